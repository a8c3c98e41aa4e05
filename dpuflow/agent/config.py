"""The agent's configuration: a YAML file in, dataclasses out; every error names file, line and option.

An empty file, or none, is a whole configuration. ``docs/agent.md`` lists the options; its table is made from
the fields here (``table``), and a test compares them.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Final, get_args, get_origin, get_type_hints

from dpuflow.errors import OptionError
from dpuflow.live.options import (
    DEFAULT_BUFFER,
    DOCA_METHODS,
    HOOKS,
    MIN_SNAPLEN,
    PRODUCTIONS,
    PROTOCOLS,
)
from dpuflow.quantities import whole_number
from dpuflow.results.tokens import CONDITIONS
from dpuflow.settings import DURATION, SHARE, SIZE, Reader, setting, written

BACKENDS: Final = ("ebpf", "bcc", "afpacket", "doca")
FIDELITIES: Final = ("packets", "messages")
CLOCKS: Final = ("auto", "trust", "estimate")
SEVERITIES: Final = ("info", "warning", "critical")


def _address(value: str) -> str | None:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return f"{value!r} is not an IPv4 or IPv6 address"
    return None


def _listen(value: str) -> str | None:
    """ADDRESS:PORT, [IPV6]:PORT or "off"."""
    if value == "off":
        return None
    host, _, port = value.rpartition(":")
    if not host or not 0 < (whole_number(port) or 0) < 65536:
        return f"{value!r} is not ADDRESS:PORT, such as 127.0.0.1:9477, and not off either"
    return _address(host.strip("[]"))


HIDDEN: Final = "/..."
"""In place of what may be secret in a URL."""
_FILL_IN: Final = "# URLs of webhooks may hold secrets: write the rest of them in place of '...'.\n"


def _url(value: str) -> str | None:
    parts = urllib.parse.urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "is not an http:// or https:// URL"
    if value.endswith(HIDDEN):
        return "write the rest of the URL in place of '...', which --print-config leaves out"
    return None


def _folder(value: str) -> str | None:
    return None if value.strip() else f'"{value}" is no folder; null keeps no history'


def local(listen: str) -> bool:
    """Whether only this machine reaches ``listen`` (ADDRESS:PORT)."""
    return ipaddress.ip_address(listen.rpartition(":")[0].strip("[]")).is_loopback


@dataclass(frozen=True)
class Capture:
    """Where packets are taken from, and which; as the options of ``dpuflow capture``."""

    interfaces: list[str] = setting(
        ["auto"], "interfaces to capture on; auto: every physical Ethernet interface that is up"
    )
    backend: str = setting("ebpf", "capture backend", choices=BACKENDS)
    hook: str = setting("auto", "where the programs attach", choices=HOOKS)
    mode: str = setting("packets", "full detail: packets, or messages folded in the kernel",
                        choices=FIDELITIES)  # fmt: skip
    protocols: list[str] = setting(["roce", "tcp"], "protocols to capture", choices=tuple(PROTOCOLS))
    snaplen: int = setting(192, "bytes to keep of each packet", low=MIN_SNAPLEN, high=65535, unit=SIZE)
    hosts: list[str] = setting([], "only packets from or to these addresses", check=_address)
    ports: list[int] = setting([], "TCP: only these ports", low=1, high=65535)
    qps: list[int] = setting([], "RoCE: only packets to these QPs", low=0, high=0xFFFFFF)
    vlans: list[int] = setting([], "only these (outer) VLANs", low=0, high=4094)
    buffer: int = setting(DEFAULT_BUFFER, "ring between kernel and agent", low=1 << 20, high=1 << 32,
                          unit=SIZE)  # fmt: skip
    sample: int = setting(0, "follow one in 2^N pairs of hosts", low=0, high=16)
    peer: str = setting("hpf", "backend doca: what is behind the uplink: hpf (the host), vfN or sfN")
    copy_by: str = setting("auto", "backend doca: how the card makes copies", choices=DOCA_METHODS)
    production: str = setting("pair", "backend doca: what forwards the traffic itself", choices=PRODUCTIONS)


@dataclass(frozen=True)
class Windows:
    """How often results are published, and on how much traffic they rest."""

    step: float = setting(1.0, "publish results this often", low=0.1, high=60, unit=DURATION)
    span: float = setting(
        10.0, "shortest span of traffic to hold and analyse", low=2, high=600, unit=DURATION
    )
    longest: float = setting(
        60.0,
        "longest span of traffic to hold, where there is little of it",
        low=10,
        high=86400,
        unit=DURATION,
    )
    messages: int = setting(
        4000, "hold traffic beyond the span until there are this many messages", low=100,
        high=10_000_000,
    )  # fmt: skip
    settle: float = setting(
        1.0, "publish a collective this long after its end", low=0.05, high=60,
        unit=DURATION,
    )  # fmt: skip


@dataclass(frozen=True)
class Analysis:
    """How messages are read."""

    ranks: str | None = setting(None, "rank map (YAML: address -> rank, GPU, host)")
    runbooks: str | None = setting(
        None, "URL of the runbooks page; links add #CONDITION; null: the page that came with this dpuflow"
    )
    confirm: float = setting(
        1.5,
        "report a finding once its condition has lasted this long",
        low=0,
        high=3600,
        unit=DURATION,
    )
    hold: float = setting(
        10.0, "close a finding that was not confirmed for this long", low=1, high=86400,
        unit=DURATION,
    )  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What the agent may use; it gives up detail before it exceeds them, and says so."""

    cpu: float = setting(0.5, "CPU the agent may use on average, of one core", low=0.05, high=64,
                         unit=SHARE)  # fmt: skip
    memory: int = setting(
        512 << 20, "resident memory the agent may use", low=256 << 20, high=1 << 40, unit=SIZE
    )
    max_sample: int = setting(6, "sample at most down to one in 2^N pairs of hosts", low=0, high=16)
    recover: float = setting(
        30.0, "restore detail after this long with room to spare", low=1, high=3600, unit=DURATION
    )


OWN_BYTES: Final = 96 << 20
"""What the agent takes before it holds anything: interpreter, NumPy, kernels, API, an analysis of little."""


def base_bytes(buffer: int) -> int:
    """Resident memory before anything is held."""
    return OWN_BYTES + buffer


@dataclass(frozen=True)
class History:
    """The local history that ``dpuflow analyze DIR`` reads."""

    directory: str | None = setting("/var/lib/dpuflow", "folder to keep it in; null: keep none",
                                    check=_folder)  # fmt: skip
    segment: float = setting(5.0, "time that one file covers", low=1, high=600, unit=DURATION)
    keep_size: int = setting(1 << 30, "largest size on disk", low=1 << 20, high=1 << 50, unit=SIZE)
    keep_age: float = setting(86400.0, "longest time to keep", low=10, high=86400 * 3650, unit=DURATION)


@dataclass(frozen=True)
class Metrics:
    """Prometheus metrics, served at /metrics of ``api.listen``."""

    max_peers: int = setting(
        256, "pairs of addresses, and members of groups, with their own series; the rest share other",
        low=0, high=65536,
    )  # fmt: skip
    max_groups: int = setting(64, "groups with their own series; the rest share other", low=0, high=65536)
    nic_counters: bool = setting(True, "export the counters of RDMA devices, drivers and interfaces, too")
    sysfs: str = setting("/sys", "where sysfs is mounted (a container may have the host's elsewhere)")


@dataclass(frozen=True)
class Api:
    """The HTTP server: /metrics and the API."""

    listen: str = setting("127.0.0.1:9477", "ADDRESS:PORT, or off", check=_listen)
    health: str = setting(
        "off", "ADDRESS:PORT for health probes only, unaffected by load on the API, or off",
        check=_listen,
    )  # fmt: skip
    token_file: str | None = setting(None, "file with the token that requests must carry")
    tls_cert: str | None = setting(None, "certificate chain, PEM")
    tls_key: str | None = setting(None, "its private key, PEM")
    insecure: bool = setting(
        False, "listen to other machines without TLS and token: something else protects the address"
    )
    events: int = setting(1000, "events to keep for stream clients that reconnect", low=10, high=100_000)
    max_clients: int = setting(32, "most clients of the event stream", low=1, high=1000)


@dataclass(frozen=True)
class Webhook:
    """One receiver of findings."""

    url: str = setting(MISSING, "URL to post findings to", check=_url)
    name: str | None = setting(None, "its name in metrics; null: its host")
    conditions: list[str] = setting([], "post only these conditions; empty: all", choices=CONDITIONS)
    min_severity: str = setting("warning", "post from this severity on", choices=SEVERITIES)
    token_file: str | None = setting(None, "file with the bearer token to send")
    secret_file: str | None = setting(None, "file with the secret to sign notices with")
    ca_file: str | None = setting(None, "certificates to trust, PEM; null: the system's")
    insecure: bool = setting(False, "send to another machine by plain http")
    timeout: float = setting(5.0, "timeout of one attempt", low=0.1, high=60, unit=DURATION)
    give_up: float = setting(300.0, "give up on a notice after this long", low=0, high=86400, unit=DURATION)
    queue: int = setting(1000, "most notices to queue; the oldest are dropped first", low=1, high=100_000)


@dataclass(frozen=True)
class Log:
    """What is written to standard error (the journal, under systemd)."""

    level: str = setting("info", "log from this level on", choices=("debug", "info", "warning", "error"))
    format: str = setting("text", "text, or json: one object a line", choices=("text", "json"))
    status: float = setting(600.0, "log a status line this often; 0: never", low=0, high=86400, unit=DURATION)


@dataclass(frozen=True)
class Config:
    """All of it."""

    node: str | None = setting(None, "this node's name in results and file names; null: its hostname")
    capture: Capture = setting(Capture(), "where packets come from")
    windows: Windows = setting(Windows(), "how often results are published")
    analysis: Analysis = setting(Analysis(), "how messages are analysed")
    limits: Limits = setting(Limits(), "what the agent may use")
    history: History = setting(History(), "the local history")
    metrics: Metrics = setting(Metrics(), "Prometheus metrics")
    api: Api = setting(Api(), "the HTTP API")
    webhooks: list[Webhook] = setting([], "receivers of findings")
    log: Log = setting(Log(), "what is logged")


def read_config(file: str | None) -> Config:
    """The configuration in ``file``; None: the defaults. Raises OptionError and OSError."""
    if file is None:
        return Config()
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read()
    except UnicodeDecodeError as error:
        raise OptionError(f"{file}: not UTF-8 text, at byte {error.start}") from None
    return parse_config(text, file)


def parse_config(text: str, name: str) -> Config:
    """The configuration in ``text``; errors call it ``name``. Raises OptionError."""
    reader = Reader(name, "the configuration", optional=True)
    root = reader.root(text)
    config = reader.build(Config, root, "")
    windows = config.windows
    for bad, section, key, why in (
        (not config.capture.interfaces, "capture", "interfaces", "is empty: name some, or auto"),
        (config.limits.memory < base_bytes(config.capture.buffer), "limits", "memory",
         f"has no room: the ring (capture.buffer) and the agent itself take"
         f" {base_bytes(config.capture.buffer) >> 20} MiB"),
        (windows.longest < windows.span, "windows", "longest", "is shorter than span"),
        (windows.settle > windows.span / 2, "windows", "settle", "is more than half of span"),
        (windows.step > windows.span / 2, "windows", "step", "is more than half of span"),
        (config.history.segment > windows.span, "history", "segment",
         f"is longer than windows.span ({windows.span:g} s): a crash would lose more than a window"),
        (bool(config.api.tls_cert) != bool(config.api.tls_key), "api", "tls_cert",
         "tls_cert and tls_key go together"),
        (_open(config.api), "api", "listen",
         "other machines reach this address: give tls_cert, tls_key and token_file as well, or insecure: "
         "true where something else protects it"),
        (_alike(config.api), "api", "health", "is the same address and port as api.listen"),
    ):  # fmt: skip
        if bad:
            raise reader.fail(_place(root, section, key), f"{section}.{key}", why)
    for number, hook in enumerate(config.webhooks):
        if hook.url.startswith("http:") and not hook.insecure and not _loopback_url(hook.url):
            raise reader.fail(
                _place(root, "webhooks", "url", number),
                f"webhooks[{number}].url",
                "would send findings in plain text to another machine: use https, or give insecure: true",
            )
    return config


def with_health(config: Config, listen: str | None) -> Config:
    """The configuration with probes answered at ``listen``, if that is given. Raises OptionError."""
    if listen is None:
        return config
    if why := _listen(listen):
        raise OptionError(f"--health: {why}")
    changed = replace(config, api=replace(config.api, health=listen))
    if _alike(changed.api):
        raise OptionError("--health: is the same address and port as api.listen")
    return changed


def _alike(api: Api) -> bool:
    """Whether API and probes would listen at one place."""
    return api.listen == api.health != "off"


def _open(api: Api) -> bool:
    """Whether anybody on the network could read what the server says."""
    guarded = api.tls_cert and api.tls_key and api.token_file
    return api.listen != "off" and not local(api.listen) and not guarded and not api.insecure


def _loopback_url(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    return host == "localhost" or (_address(host) is None and ipaddress.ip_address(host).is_loopback)


def _place(root: Any, section: str, key: str, item: int | None = None) -> Any:
    """The node of an option (of the ``item``-th entry of a list), else of its section, else the whole."""
    for name, value in getattr(root, "value", []):
        if name.value == section and isinstance(value.value, list):
            inner = value.value if item is None else value.value[item].value
            return next((k for k, _ in inner if k.value == key), name)
    return root


def as_yaml(config: Config, shown: bool = False) -> str:
    """The effective configuration, in the form that it is read in; ``shown``: as ``public`` says it."""
    import yaml

    plain = public(config) if shown else _plain(config)
    hidden = shown and any(hook["url"].endswith(HIDDEN) for hook in plain["webhooks"])
    return _FILL_IN * hidden + yaml.safe_dump(plain, sort_keys=False, default_flow_style=False)


def public(config: Config) -> dict[str, Any]:
    """The effective configuration for others to see: of URLs only the part that is no secret.

    Tokens, keys and secrets are in files, of which it names the path alone.
    """
    plain: dict[str, Any] = _plain(config)
    for hook in plain["webhooks"]:
        parts = urllib.parse.urlsplit(hook["url"])
        host = parts.netloc.rpartition("@")[2]
        hook["url"] = (
            f"{parts.scheme}://{host}{HIDDEN}"
            if parts.path.strip("/") or parts.query
            else f"{parts.scheme}://{host}"
        )
    return plain


def _plain(value: Any) -> Any:
    if not is_dataclass(value):
        return list(value) if isinstance(value, list) else value
    plain = {}
    for each in fields(value):
        inner = getattr(value, each.name)
        unit = each.metadata.get("unit")
        if isinstance(inner, list):
            plain[each.name] = [_plain(item) for item in inner]
        elif unit is not None and inner is not None:
            plain[each.name] = written(inner, unit)
        else:
            plain[each.name] = _plain(inner)
    return plain


def table() -> str:
    """The options as a table for the docs."""
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for section in fields(Config):
        inner: Any = get_type_hints(Config)[section.name]
        if section.default is None:
            lines.append(f"| `{section.name}` | null | {section.metadata['what']} |")
            continue
        listed = get_origin(inner) is list
        cls = get_args(inner)[0] if listed else inner
        for each in fields(cls):
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            unit = each.metadata.get("unit")
            if default is MISSING:
                shown = "must be given"
            elif unit is not None and default is not None:
                shown = str(written(default, unit))
            elif isinstance(default, list):
                shown = f"[{', '.join(map(str, default))}]"
            else:
                shown = (
                    "null"
                    if default is None
                    else str(default).lower()
                    if isinstance(default, bool)
                    else str(default)
                )
            choices = each.metadata.get("choices")
            more = f" ({', '.join(map(str, choices))})" if choices else ""
            name = f"{section.name}{'[]' if listed else ''}.{each.name}"
            lines.append(f"| `{name}` | {shown} | {each.metadata['what']}{more} |")
    return "\n".join(lines)
