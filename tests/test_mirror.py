"""``dpuflow mirror``: the commands of each way, against those expected; steps undone whatever fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpuflow.errors import DpuflowError, MissingError, OptionError
from dpuflow.live.mirror import base
from dpuflow.live.mirror.base import CommandMirror, MirrorPlan, Step
from dpuflow.live.mirror.providers import PROVIDERS, provider

PROJECT = Path(__file__).resolve().parents[1]


def lines(way: str, **plan: object) -> list[str]:
    return provider(way, MirrorPlan(**plan)).lines()  # type: ignore[arg-type]


def test_tc_copies_and_forwards_in_one_rule() -> None:
    assert lines("tc", source="p0", peer="pf0hpf", to="en3f0pf0sf7", protocols=("roce",)) == [
        "tc qdisc add dev p0 clsact  # unless clsact already",
        "tc qdisc add dev pf0hpf clsact  # unless clsact already",
        "tc filter add dev p0 ingress protocol ip pref 55776 flower skip_sw ip_proto udp dst_port 4791"
        " action mirred egress mirror dev en3f0pf0sf7 pipe action mirred egress redirect dev pf0hpf",
        "tc filter add dev p0 ingress protocol ipv6 pref 55777 flower skip_sw ip_proto udp dst_port 4791"
        " action mirred egress mirror dev en3f0pf0sf7 pipe action mirred egress redirect dev pf0hpf",
        "tc filter add dev pf0hpf ingress protocol ip pref 55776 flower skip_sw ip_proto udp dst_port 4791"
        " action mirred egress mirror dev en3f0pf0sf7 pipe action mirred egress redirect dev p0",
        "tc filter add dev pf0hpf ingress protocol ipv6 pref 55777 flower skip_sw ip_proto udp dst_port 4791"
        " action mirred egress mirror dev en3f0pf0sf7 pipe action mirred egress redirect dev p0",
        "# at the end:",
        "tc filter del dev pf0hpf ingress protocol ipv6 pref 55777",
        "tc filter del dev pf0hpf ingress protocol ip pref 55776",
        "tc filter del dev p0 ingress protocol ipv6 pref 55777",
        "tc filter del dev p0 ingress protocol ip pref 55776",
        "tc qdisc del dev pf0hpf clsact",
        "tc qdisc del dev p0 clsact",
    ]


def test_tc_of_everything_and_its_receiver() -> None:
    said = lines("tc", source="p0", peer="pf0hpf", to="sf", receiver="enp3s0f0s7", protocols=("any", "tcp"))
    assert said[:2] == ["ip link set dev enp3s0f0s7 up", "ip link set dev enp3s0f0s7 promisc on"]
    assert (
        "tc filter add dev p0 ingress protocol all pref 55776 flower skip_sw action mirred egress mirror"
        " dev sf pipe action mirred egress redirect dev pf0hpf"
    ) in said
    assert sum("filter add" in line for line in said) == 2
    assert said[-1] == "ip link set dev enp3s0f0s7 promisc off"


def test_samples() -> None:
    said = lines("sample", source="p0", peer="pf0hpf", protocols=("tcp",), rate=500, group=7, truncate=96)
    assert (
        "tc filter add dev p0 ingress protocol ip pref 55776 flower skip_sw ip_proto tcp action sample"
        " rate 500 group 7 trunc 96 action mirred egress redirect dev pf0hpf"
    ) in said
    assert "trunc" not in " ".join(lines("sample", source="p0", peer="h", truncate=0))


def test_software() -> None:
    said = lines("tc-software", source="eth2", to="mon0", protocols=("roce", "tcp"))
    added = [line for line in said if "filter add" in line]
    assert len(added) == 8
    assert added[0] == (
        "tc filter add dev eth2 ingress protocol ip pref 55776 u32 match ip protocol 17 0xff"
        " match ip dport 4791 0xffff action mirred egress mirror dev mon0 continue"
    )
    assert added[-1] == (
        "tc filter add dev eth2 egress protocol ipv6 pref 55779 u32 match ip6 protocol 6 0xff"
        " action mirred egress mirror dev mon0 continue"
    )


def test_ovs_adds_to_the_mirrors_of_the_bridge() -> None:
    said = lines("ovs", source="p0", to="en3f0pf0sf7", bridge="ovsbr1")
    name = f"dpuflow-{os.getpid()}"
    assert said == [
        "ovs-vsctl add-port ovsbr1 en3f0pf0sf7  # unless so already",
        "ovs-vsctl -- --id=@from get port p0 -- --id=@to get port en3f0pf0sf7 -- --id=@mirror create mirror"
        f" name={name} select-src-port=@from select-dst-port=@from output-port=@to"
        " -- add bridge ovsbr1 mirrors @mirror",
        "# at the end:",
        f"ovs-vsctl -- --id=@mirror get mirror {name} -- remove bridge ovsbr1 mirrors @mirror",
        "ovs-vsctl --if-exists del-port ovsbr1 en3f0pf0sf7",
    ]


@pytest.mark.parametrize(
    ("way", "plan", "why"),
    [
        ("tc", {"source": "p0", "to": "sf"}, "--peer is required"),
        ("tc", {"source": "p0", "to": "p0", "peer": "h"}, "must be different interfaces"),
        ("sample", {"source": "p0"}, "--peer is required"),
        ("tc-software", {"source": "p0", "to": "m", "peer": "h"}, "--peer applies to tc"),
        ("tc-software", {"source": "p0"}, "--to is required"),
        ("ovs", {"source": "p0", "to": "sf", "peer": "h", "bridge": "b"}, "OVS knows the path"),
        ("doca", {"source": "p0"}, "--to is required"),
        ("doca", {"source": "p0", "to": "eth9"}, "'eth9' is not a representor"),
    ],
)
def test_what_cannot_be(way: str, plan: dict[str, str], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        provider(way, MirrorPlan(**plan))  # type: ignore[arg-type]


def test_the_command_line(tmp_path: Path) -> None:
    def dpuflow(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dpuflow", "mirror", *words],
            env=os.environ | {"PYTHONPATH": str(PROJECT), "DPUFLOW_RUN": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    done = dpuflow("tc", "--from", "p0", "--peer", "pf0hpf", "--to", "sf", "--dry-run")
    assert done.returncode == 0
    assert done.stdout.splitlines() == lines("tc", source="p0", peer="pf0hpf", to="sf")
    wrong = dpuflow("tc", "--from", "p0", "--to", "sf", "--dry-run")
    assert wrong.returncode == 2
    assert "Error: --peer is required for this kind of mirror." in wrong.stderr
    assert list(PROVIDERS) == ["tc", "sample", "ovs", "doca", "tc-software"]
    assert not list(tmp_path.iterdir())


# -- steps ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPUFLOW_RUN", str(tmp_path / "run"))
    return tmp_path


def touching(folder: Path, name: str, **more: object) -> Step:
    path = str(folder / name)
    return Step(("mkdir", path), ("rmdir", path), **more)  # type: ignore[arg-type]


def test_steps_are_undone_in_reverse_and_noted_meanwhile(folder: Path) -> None:
    steps = [touching(folder, "a"), touching(folder, "a/b"), touching(folder, "a/b/c")]
    with CommandMirror(steps) as running:
        assert (folder / "a/b/c").is_dir()
        (noted,) = (folder / "run").iterdir()
        assert [step["undo"][1] for step in json.loads(noted.read_text())["taken"]] == [
            str(folder / name) for name in ("a", "a/b", "a/b/c")
        ]
    assert running.warnings == []
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert not list((folder / "run").iterdir())


def test_a_step_that_fails_undoes_those_before(folder: Path) -> None:
    with (
        pytest.raises(DpuflowError, match=r"^mkdir .*/no/such: mkdir: cannot create directory"),
        CommandMirror([touching(folder, "a"), touching(folder, "no/such")]),
    ):
        pass
    with (
        pytest.raises(MissingError, match="command not found: nothing-of-that-name"),
        CommandMirror([touching(folder, "a"), Step(("nothing-of-that-name",))]),
    ):
        pass
    assert not (folder / "a").exists()
    assert not list((folder / "run").iterdir())


def test_what_was_there_stays(folder: Path) -> None:
    (folder / "theirs").mkdir()
    shown = ("ls", str(folder))
    with CommandMirror([touching(folder, "theirs", unless=shown, has="theirs"), touching(folder, "ours")]):
        assert (folder / "ours").is_dir()
    assert (folder / "theirs").is_dir()
    assert not (folder / "ours").exists()
    with (
        pytest.raises(DpuflowError, match="something else has theirs there"),
        CommandMirror([touching(folder, "theirs", absent=shown, has="theirs")]),
    ):
        pass
    with CommandMirror([touching(folder, "used", still=(("ls", str(folder / "used")),))]):
        (folder / "used" / "x").touch()
    assert (folder / "used" / "x").exists()  # others have come to use it


def test_an_exception_and_what_cannot_be_undone(folder: Path) -> None:
    mirror = CommandMirror([touching(folder, "a")])
    with pytest.raises(KeyboardInterrupt), mirror:
        raise KeyboardInterrupt
    assert not (folder / "a").exists()
    with mirror:
        (folder / "a" / "x").touch()
    assert len(mirror.warnings) == 1
    assert mirror.warnings[0].startswith(f"not undone: rmdir {folder}/a: rmdir: failed to remove")


def test_what_the_dead_have_left_is_cleaned_and_that_of_the_living_is_not(folder: Path) -> None:
    with CommandMirror([touching(folder, "living")]):
        path = f"'{folder}/dead'"
        script = (
            "import os; from dpuflow.live.mirror.base import CommandMirror, Step;"
            f"CommandMirror([Step(('mkdir', {path}), ('rmdir', {path}))]).__enter__(); os._exit(0)"
        )
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0
        assert (folder / "dead").is_dir()
        assert len(base.leftovers()) == 1
        (folder / "run" / "mirror-1.json").write_text("{broken")
        assert base.clean() == [f"mkdir {folder}/dead"]
        assert not (folder / "dead").exists()
        assert (folder / "living").is_dir()
        assert base.clean() == []


# -- doctor ---------------------------------------------------------------------------------------


def machine(folder: Path, monkeypatch: pytest.MonkeyPatch, *, arm: bool = True, **commands: str) -> Path:
    """A BlueField-3's files, and commands that print what is given (a line with ! fails)."""
    device = folder / "sys/bus/pci/devices/0000:03:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x15b3\n")
    (device / "device").write_text("0xa2dc\n")
    (folder / "sys/class/net/pf0hpf").mkdir(parents=True)
    (folder / "etc").mkdir()
    if arm:
        (folder / "etc/mlnx-release").write_text("bf-bundle-2.9.1\n")
    tools = folder / "bin"
    tools.mkdir()
    for name, text in commands.items():
        tool = tools / name.replace("_", "-")
        tool.write_text(
            f"#!/bin/sh\n{'exit 1' if text == '!' else f'cat <<END{chr(10)}{text}{chr(10)}END'}\n"
        )
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("DPUFLOW_RUN", str(folder / "run"))
    monkeypatch.setenv("DPUFLOW_DOCA", str(folder / "none.so"))
    return folder


SWITCHDEV = "pci/0000:03:00.0: mode switchdev inline-mode none encap-mode basic"


def told(folder: Path, filters: str = "flower u32 sample") -> dict[str, tuple[bool, str]]:
    from dpuflow.live.dpu import examine

    return {name: (met, text) for name, met, text in examine(lambda attempt: filters, folder)}


def test_doctor_on_a_card_whose_eswitch_ovs_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(
        machine(
            tmp_path,
            monkeypatch,
            devlink=SWITCHDEV,
            ovs_vsctl='{doca-init="true", hw-offload="true"}',
            mlxconfig="        INTERNAL_CPU_MODEL        EMBEDDED_CPU(1)",
        )
    )
    assert list(said) == ["card", "mode", "switchdev", "eswitch", "doca", "tc", "ovs", "mirrors", "use"]
    assert said["card"] == (True, "BlueField-3, 0000:03:00.0, on its Arm cores")
    assert said["mode"] == (True, "DPU mode")
    assert said["switchdev"][0]
    assert said["eswitch"] == (False, "OVS-DOCA owns it: use mirror ovs, not --backend doca")
    assert not said["doca"][0]
    assert "build it with `make doca`" in said["doca"][1]
    assert said["use"][1].startswith("dpuflow mirror ovs")


def test_doctor_on_a_card_in_nic_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "INTERNAL_CPU_MODEL EMBEDDED_CPU(1)\nINTERNAL_CPU_OFFLOAD_ENGINE DISABLED(1)"
    said = told(machine(tmp_path, monkeypatch, arm=False, devlink="!", mlxconfig=config, ovs_vsctl="!"))
    assert not said["card"][0]
    assert "seen from the host" in said["card"][1]
    assert said["mode"] == (
        False,
        "NIC mode: the Arm cores see no traffic; capture at the switch or from the RDMA device, or set"
        " DPU mode and power-cycle",
    )  # fmt: skip
    assert "the eSwitch's mode is unknown: devlink dev eswitch set" in said["switchdev"][1]
    assert said["ovs"] == (False, "Open vSwitch is installed, but not running")


def test_doctor_where_all_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doca_card import Card

    card = Card(tmp_path, "2.7")
    folder = machine(tmp_path, monkeypatch, devlink=SWITCHDEV, mlxconfig="!", ovs_vsctl="{}")
    for name in ("DPUFLOW_DOCA", "DPUFLOW_SIM_CARD"):
        monkeypatch.setenv(name, card.environment[name])
    script = (
        "from pathlib import Path; from dpuflow.live.dpu import examine;"
        f"print(*(line for line in examine(lambda a: 'u32', Path('{folder}'))), sep=chr(10))"
    )
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "('doca', True, 'adapter of DOCA 2.7.85: mirror, by DPDK; DOCA sees 2 devices')" in done.stdout
    assert "('tc', True, 'works: u32; this kernel lacks flower, sample')" in done.stdout
    assert "('use', True, 'dpuflow capture --backend doca')" in done.stdout
    (folder / "etc/kubelet.d").mkdir()
    (folder / "etc/kubelet.d/doca_hbn.yaml").touch()
    assert told(folder)["eswitch"] == (False, "HBN owns it (doca_hbn.yaml): use HBN's own mirroring")


def test_doctor_sees_a_dpdk_program_but_not_this_process(tmp_path: Path) -> None:
    import fcntl

    from dpuflow.live.dpu import Machine, taken_by

    lock = tmp_path / "var/run/dpdk/rte/config"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert taken_by(Machine(tmp_path)) is None
    with lock.open("r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        assert taken_by(Machine(tmp_path)) is None
        code = (
            "import sys; from pathlib import Path; from dpuflow.live.dpu import Machine, taken_by;"
            f"print(taken_by(Machine(Path({str(tmp_path)!r}))))"
        )
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout == "a DPDK or DOCA program is running: stop it to use --backend doca\n", (
            done.stderr
        )
