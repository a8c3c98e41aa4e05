"""What is deployed: the unit, the chart and the pod ask for the same few rights, and each is well-formed."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART = DEPLOY / "helm" / "dpuflow-agent"
RIGHTS = {"BPF", "PERFMON", "NET_ADMIN", "NET_RAW"}


def unit(path: Path = DEPLOY / "systemd" / "dpuflow-agent.service") -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser


def chart_values() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return values


def test_the_unit_gives_the_capabilities_that_are_needed_and_no_others() -> None:
    service = unit()["Service"]
    for key in ("AmbientCapabilities", "CapabilityBoundingSet"):
        assert {word.removeprefix("CAP_") for word in service[key].split()} == RIGHTS
    assert service["User"] == "dpuflow"
    assert service["NoNewPrivileges"] == "yes"


def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze (package systemd)")
    # Only the command is not there before the package is installed.
    text = (DEPLOY / "systemd" / "dpuflow-agent.service").read_text()
    path = tmp_path / "dpuflow-agent.service"
    path.write_text(text.replace("/usr/bin/dpuflow", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if path.name in line]
    assert not said


def test_systemd_counts_the_unit_as_well_protected() -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze (package systemd)")
    done = subprocess.run(
        [
            *("systemd-analyze", "security", "--offline=yes", "--threshold=20"),
            str(DEPLOY / "systemd" / "dpuflow-agent.service"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot look at a unit that is not loaded")
    assert done.returncode == 0, done.stdout.splitlines()[-1:]


def test_the_pods_have_the_rights_of_the_unit() -> None:
    pod = yaml.safe_load((DEPLOY / "kubelet" / "dpuflow-agent.yaml").read_text())
    (container,) = pod["spec"]["containers"]
    assert set(container["securityContext"]["capabilities"]["add"]) == RIGHTS
    text = (CHART / "templates" / "daemonset.yaml").read_text()
    (added,) = re.findall(r"add: \[(.*)\]", text)
    assert set(added.split(", ")) == RIGHTS


def test_every_volume_that_the_pod_mounts_is_there() -> None:
    pod = yaml.safe_load((DEPLOY / "kubelet" / "dpuflow-agent.yaml").read_text())
    (container,) = pod["spec"]["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize("name", ["configmap.yaml", "daemonset.yaml"])
def test_the_chart_names_no_value_that_it_has_no_default_for(name: str) -> None:
    values = chart_values()
    used = re.findall(r"\.Values\.([A-Za-z.]+)", (CHART / "templates" / name).read_text())
    assert used
    for path in used:
        place: Any = values
        for part in path.split("."):
            assert part in place, f"{name}: {path} is not in values.yaml"
            place = place[part]


def test_the_chart_takes_what_the_platform_framework_fills_in() -> None:
    values = chart_values()
    assert {"serviceID", "serviceDaemonSet", "resources", "image", "imagePullSecrets", "tolerations"} <= set(
        values
    )
    assert {"labels", "annotations", "updateStrategy", "nodeSelector"} == set(values["serviceDaemonSet"])
    text = (CHART / "templates" / "daemonset.yaml").read_text()
    assert "svc.dpu.nvidia.com/service: {{ .Values.serviceID" in text


def test_the_chart_renders(tmp_path: Path) -> None:
    if not shutil.which("helm"):
        pytest.skip("no helm command")
    done = subprocess.run(
        ["helm", "template", "rel", str(CHART)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    kinds = {each["kind"] for each in yaml.safe_load_all(done.stdout) if each}
    assert kinds == {"ConfigMap", "DaemonSet"}


def test_all_versions_are_the_packages_own() -> None:
    import dpuflow

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == chart_values()["image"]["tag"] == dpuflow.__version__
    pod = (DEPLOY / "kubelet" / "dpuflow-agent.yaml").read_text()
    assert f"image: dpuflow:{dpuflow.__version__}" in pod
    service = yaml.safe_load((DEPLOY / "dpf" / "dpuservice.yaml").read_text())
    assert service["spec"]["helmChart"]["source"]["version"] == dpuflow.__version__
    assert service["spec"]["helmChart"]["source"]["chart"] == chart["name"]


def test_the_configuration_that_the_package_brings_is_a_valid_one() -> None:
    from dpuflow.agent.config import read_config

    read_config(str(DEPLOY / "debian" / "agent.yaml"))


def test_the_chart_s_example_is_a_valid_configuration(tmp_path: Path) -> None:
    from dpuflow.agent.config import read_config

    service = yaml.safe_load((DEPLOY / "dpf" / "dpuservice.yaml").read_text())
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump(service["spec"]["helmChart"]["values"]["config"]))
    read_config(str(path))


ROOT = DEPLOY.parent


@pytest.mark.long
def test_two_builds_of_the_wheel_have_the_same_bytes(tmp_path: Path) -> None:
    """In other folders, at other times, with another umask, beside what an older build left.

    Kernels and eBPF objects have tests of their own.
    """
    built = []
    for number, umask in enumerate((0o022, 0o077)):
        folder = tmp_path / f"checkout{number}"
        subprocess.run(["git", "clone", "-q", "--no-local", str(ROOT), str(folder)], check=True, umask=umask)
        for pattern in ("dpuflow/kernels/shipped-*.so", "dpuflow/live/*.bpf.o"):
            for path in ROOT.glob(pattern):
                (folder / path.relative_to(ROOT)).write_bytes(path.read_bytes())
        (folder / "build/lib/dpuflow").mkdir(parents=True)
        (folder / f"build/lib/dpuflow/gone{number}.py").touch()
        subprocess.run(
            ["make", "wheel", f"PYTHON={sys.executable}"],
            cwd=folder,
            check=True,
            umask=umask,
            capture_output=True,
        )
        (wheel,) = (folder / "dist").glob("*.whl")
        built.append((wheel.name, wheel.read_bytes()))
        time.sleep(2)  # a zip file keeps times to two seconds
    assert built[0] == built[1]


def test_no_message_names_an_index_that_does_not_hold_dpuflow() -> None:
    asked = subprocess.run(
        ["git", "grep", "-nE", r"pip install .?dpuflow", "--", "dpuflow", "docs", "README.md", "deploy"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    if asked.returncode > 1:
        pytest.skip("no git checkout")
    assert not asked.stdout


def test_what_is_locked_has_hashes_names_no_host_and_covers_what_is_asked_for() -> None:
    for path in sorted((ROOT / "tools" / "lock").glob("*.txt")):
        text = path.read_text()
        assert "://" not in text, path.name
        assert "--index" not in text, path.name
        assert not re.search(r"\\\n\S", text), f"{path.name}: a package is read as part of the one before"
        pinned = re.findall(r"^([A-Za-z0-9._-]+)==[^\n]* \\\n +--hash=sha256:", text, re.M)
        assert len(pinned) == len(re.findall(r"==", re.sub(r" ; .*", "", text))), path.name
        extras = {"run": [], "test": ["dev"]}.get(path.stem, ["agent", "doca"])
        if path.stem in ("gloo", "sbom"):  # beside what is asked for
            continue
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "requirements.py"), *extras],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        asked = {re.split(r"[<>=\[; ]", line)[0].lower().replace("_", "-") for line in lines}
        assert asked <= {name.lower().replace("_", "-") for name in pinned}, path.name


@pytest.mark.parametrize("script", ["setup.sh", "deb.sh", "bare.sh", "lock.sh", "bpf.sh"])
def test_scripts_are_shell_that_any_sh_reads(script: str) -> None:
    path = ROOT / "tools" / script
    assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0
    assert "systemctl" not in path.read_text()  # no daemon is started, stopped, masked or reconfigured


STUB = """#!/bin/sh
echo "$(basename "$0") $*" >>"$LOG"
case "$(basename "$0") $*" in
"id -u") echo "$USER_ID" ;;
"apt-cache policy "*) echo "  Candidate: 1" ;;
"dpkg -x "*) mkdir unpacked ;;
*" -m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
esac
"""
NEEDED = "sh, basename, dirname, cat, cp, grep, mkdir, mktemp, mv, rm, sed, touch, tr"
SERVICES = ("prometheus", "openvswitch-switch", "openssh-server")


@pytest.mark.parametrize("want", ["run", "live", "test"])
@pytest.mark.parametrize("user", [0, 1000], ids=["root", "user"])
def test_setup_lists_what_it_installs_and_installs_no_service(user: int, want: str, tmp_path: Path) -> None:
    """On a system that has nothing yet: `make demo` installs nothing by apt at all, nobody but root does."""
    bin_, log = tmp_path / "bin", tmp_path / "log"
    bin_.mkdir()
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "tools")
    (tmp_path / "tools" / "bpf.sh").write_text('echo bpf >>"$LOG"\n')
    for tool in re.findall(r"\w+", NEEDED):
        (bin_ / tool).symlink_to(shutil.which(tool) or "")
    for tool in ("id", "apt-get", "apt-cache", "dpkg", "systemctl", "service", "invoke-rc.d", "python"):
        (bin_ / tool).write_text(STUB)
        (bin_ / tool).chmod(0o755)
    done = subprocess.run(
        ["sh", "tools/setup.sh", want],
        cwd=tmp_path,
        env={"PATH": str(bin_), "LOG": str(log), "PYTHON": str(bin_ / "python"), "USER_ID": str(user)},
        capture_output=True,
        text=True,
        check=True,
    )
    ran = log.read_text().splitlines()
    assert not [line for line in ran if line.startswith(("systemctl", "service", "invoke-rc.d"))]
    installed = [
        [word for word in line.split()[2:] if not word.startswith("-")]
        for line in ran
        if line.startswith("apt-get") and " install " in line
    ]
    listed = re.findall(r"setup: installing these packages of the distribution: (.*)", done.stdout)
    assert [" ".join(words[1:]) for words in installed] == listed
    assert not {*SERVICES} & {word for words in installed for word in words}
    pip = [line for line in ran if " -m pip install " in line]
    assert f"--require-hashes -r tools/lock/{'test' if want == 'test' else 'run'}.txt" in pip[0]
    if want == "run" or user:
        assert not installed
        assert ("not installed, as this needs root" in done.stderr) == (want != "run")
    else:
        assert {"clang", "libbpf-dev"} & {word for words in installed for word in words}
    if want == "run":
        assert not [line for line in ran if line.startswith(("apt-", "dpkg", "bpf")) or "warm" in line]
    else:
        assert "bpf" in ran


@pytest.mark.parametrize("set_up", [False, True])
def test_the_demo_starts_no_compilation(set_up: bool, tmp_path: Path) -> None:
    """In the background it took a minute of CPU, which no time of `make demo` held."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for needed in ("setup.cfg", "pyproject.toml", "tools/setup.sh", "tools/lock/run.txt"):
        (tmp_path / needed).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / needed).touch()
    if set_up:
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv/.ready-test").touch()
    done = subprocess.run(["make", "-n", "demo"], cwd=tmp_path, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "dpuflow analyze" in line]
    assert line.startswith("DPUFLOW_PLAIN=1 ") != set_up


@pytest.mark.parametrize(
    "path", [DEPLOY / "kubelet" / "dpuflow-agent.yaml", CHART / "templates" / "daemonset.yaml"]
)
def test_probes_go_to_their_own_listener(path: Path) -> None:
    """A crowd at the API made kubelet restart the agent."""
    text = path.read_text()
    (listen,) = re.findall(r'--health, "[\d.]+:(\d+)"\]', text)
    (asked,) = re.findall(r"httpGet: \{.*port: (\d+)\}", text)
    assert asked == listen != "9477"
