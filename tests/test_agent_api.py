"""The HTTP API over a real socket: answers are what the OpenAPI document says, errors are problem details."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import jsonschema
import pytest
from agent_http import Running, serving
from agent_worlds import ADDRESSES, MS, S, board, finding, health, window

from dpuflow import results
from dpuflow.agent import openapi
from dpuflow.agent.board import Board
from dpuflow.agent.config import Api, Webhook
from dpuflow.agent.routes import ROUTES
from dpuflow.agent.tally import group_name
from dpuflow.errors import OptionError

DOCS = Path(__file__).resolve().parents[1] / "docs"
PATHS = [
    "/api/v1/groups",
    "/api/v1/collectives",
    "/api/v1/transfers",
    "/api/v1/lateness",
    "/api/v1/findings",
    "/api/v1/steps",
    "/api/v1/network_cost",
    "/api/v1/windows",
    "/api/v1/health",
    "/healthz",
    "/readyz",
]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(board()) as made:
        yield made


def check(kind: str, value: object) -> None:
    """``value`` is what the document says of ``kind``, and no key more."""
    components = openapi.document()["components"]
    schema = {"$ref": f"#/components/schemas/{kind}", "components": components}
    jsonschema.Draft202012Validator(schema).validate(value)
    named = components["schemas"][kind]["properties"]
    assert isinstance(value, dict)
    assert set(value) == set(named)


@pytest.mark.parametrize("path", PATHS)
def test_each_answer_is_what_the_document_says(running: Running, path: str) -> None:
    answer = running.get(path)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["cache-control"] == "no-store"
    said = openapi.document()["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
    check(said["schema"]["$ref"].rpartition("/")[2], answer.json)


def test_the_document_is_the_one_in_docs_and_the_one_served(running: Running) -> None:
    assert (DOCS / "openapi.json").read_text() == openapi.text(), (
        "python -m dpuflow.agent.openapi > docs/openapi.json"
    )
    assert running.get("/api/v1/openapi.json").json == json.loads(openapi.text())


def test_all_routes_are_in_the_document_and_every_reference_leads_somewhere() -> None:
    made = openapi.document()
    assert set(made["paths"]) == {route.path for route in ROUTES}
    ids = [path["get"]["operationId"] for path in made["paths"].values()]
    assert len(set(ids)) == len(ids)
    text = json.dumps(made)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in made["components"]["schemas"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("CollectiveRow", results.Collective),
        ("LatenessRow", results.Lateness),
        ("FindingRow", results.Finding),
        ("GroupRow", results.Group),
        ("EdgeRow", results.Edge),
        ("TransferRow", results.Transfer),
        ("Endpoint", results.Endpoint),
    ],
)
def test_rows_have_the_names_of_the_result_format_first_and_in_its_order(name: str, row: type) -> None:
    named = list(openapi.document()["components"]["schemas"][name]["properties"])
    wanted = [each.name.rstrip("_") for each in fields(row)]
    assert named[: len(wanted)] == wanted


def test_groups(running: Running) -> None:
    answer = running.get("/api/v1/groups").json
    (group,) = answer["groups"]
    assert [answer["endpoints"][each]["address"] for each in group["endpoints"]] == list(ADDRESSES)
    assert (group["kind"], group["collectives"], group["wire_bytes"]) == ("dp", 20, 20 * (4 << 20))
    assert group["operations"] == [{"op": "all_reduce", "algorithm": "ring", "count": 20}]
    assert group["name"] == group_name(ADDRESSES)


def test_lateness_with_edges(running: Running) -> None:
    answer = running.get("/api/v1/lateness").json
    address = [endpoint["address"] for endpoint in answer["endpoints"]]
    late = answer["lateness"][0]
    assert (address[late["endpoint"]], late["verdict"], late["cause"]) == ("10.0.0.2", "late", "compute")
    assert (late["median_ns"], late["late_share"], late["collectives"]) == (5 * MS, 1.0, 20)
    (edge,) = answer["edges"]
    assert (address[edge["from"]], address[edge["to"]], edge["median_ns"]) == ("10.0.0.1", "10.0.0.2", 5 * MS)
    assert (answer["start_ns"], answer["end_ns"]) == (0, 5 * S)


def test_steps_with_what_if_and_pipelines(running: Running) -> None:
    answer = running.get("/api/v1/steps").json
    address = [endpoint["address"] for endpoint in answer["endpoints"]]
    (step,), (what_if,), (pipeline,) = answer["steps"], answer["what_if"], answer["pipelines"]
    assert [address[each] for each in step["endpoints"]] == list(ADDRESSES)
    assert (step["kind"], step["tokens_per_s"], step["step_ns"]) == ("decode", 40.0, 25 * MS)
    assert (address[what_if["endpoint"]], what_if["step_without_ns"]) == ("10.0.0.2", 20 * MS)
    assert [address[each] for each in pipeline["stages"]] == ["10.0.0.3", "10.0.0.1"]
    assert [address[each] for each in pipeline["late"]] == ["10.0.0.1"]
    assert answer["end_ns"] == 5 * S


def test_the_last_collectives_come_without_being_asked_for(running: Running) -> None:
    answer = running.get("/api/v1/collectives?limit=3").json
    assert [row["id"] for row in answer["collectives"]] == [0, 1, 2]
    assert [row["start_ns"] for row in answer["collectives"]] == [4 * S + at * 100 * MS for at in (1, 2, 3)]
    assert answer["more"] is answer["missed"] is False
    last = answer["collectives"][-1]
    assert answer["next"] == last["key"]
    address = [endpoint["address"] for endpoint in answer["endpoints"]]
    assert [address[rank["endpoint"]] for rank in last["ranks"]] == list(ADDRESSES)
    assert [address[each] for each in last["late"]] == ["10.0.0.2"]
    assert answer["groups"][last["group"]]["name"] == group_name(ADDRESSES)


def test_pages_follow_each_other_without_gap_or_repeat(running: Running) -> None:
    answer = running.get("/api/v1/collectives?limit=7&since_ns=0").json
    seen = [row["start_ns"] for row in answer["collectives"]]
    while answer["more"]:
        answer = running.get(f"/api/v1/collectives?limit=7&after={answer['next']}").json
        seen += [row["start_ns"] for row in answer["collectives"]]
    assert seen == [number * S + at * 100 * MS for number in range(5) for at in range(4)]
    nothing = running.get(f"/api/v1/collectives?after={answer['next']}").json
    assert (nothing["collectives"], nothing["next"], nothing["more"]) == ([], answer["next"], False)


def test_transfers_come_page_by_page(running: Running) -> None:
    answer = running.get("/api/v1/transfers?limit=2").json
    address = [endpoint["address"] for endpoint in answer["endpoints"]]
    assert [row["window"] for row in answer["transfers"]] == [3, 4]  # the last ones
    row = answer["transfers"][0]
    assert (address[row["src"]], address[row["dst"]], row["verb"]) == ("10.0.0.1", "10.0.0.3", "write")
    assert (row["bytes"], row["pages"], row["likely"]) == (1 << 20, 16, "kv_cache")
    assert row["wait_before_first_token_ns"] == 9 * MS
    seen, after = [], "since_ns=0"
    for _ in range(5):
        answer = running.get(f"/api/v1/transfers?limit=2&{after}").json
        seen += [row["key"] for row in answer["transfers"]]
        after = f"after={answer['next']}"
        if not answer["more"]:
            break
    assert len(seen) == len(set(seen)) == 5
    assert running.get(f"/api/v1/transfers?{after}").json["transfers"] == []
    assert len(running.get(f"/api/v1/transfers?since_ns={3 * S}").json["transfers"]) == 2
    assert running.get("/api/v1/transfers?verb=read").json["transfers"] == []
    assert running.get("/api/v1/transfers?verb=send").status == 400


def test_collectives_by_time_group_and_operation(running: Running) -> None:
    since = 4 * S + 120 * MS  # the end of the second collective of the last window
    assert len(running.get(f"/api/v1/collectives?since_ns={since}").json["collectives"]) == 3
    name = group_name(ADDRESSES)
    assert len(running.get(f"/api/v1/collectives?group={name}&op=all_reduce").json["collectives"]) == 20
    assert running.get("/api/v1/collectives?op=barrier").json["collectives"] == []
    assert running.get("/api/v1/collectives?group=g0").json["collectives"] == []


def test_what_is_held_no_longer_is_told() -> None:
    held = Board(windows=3)
    with serving(held) as running:
        held.publish(window(0))
        key = running.get("/api/v1/collectives?limit=1").json["next"]
        held.publish(window(1))
        answer = running.get(f"/api/v1/collectives?after={key}").json
        assert (answer["missed"], [row["window"] for row in answer["collectives"]]) == (False, [1] * 4)
        for number in range(2, 8):
            held.publish(window(number))
        answer = running.get(f"/api/v1/collectives?after={key}").json
        assert answer["missed"] is True
        assert {row["window"] for row in answer["collectives"]} == {5, 6, 7}
        other_run = running.get("/api/v1/collectives?after=0123abcd-99-1").json
        assert (other_run["missed"], len(other_run["collectives"])) == (True, 12)


def test_findings_by_state_condition_and_severity() -> None:
    held = board()
    held.publish(window(6), (finding("over", active=False), finding("worse", severity="critical")))
    with serving(held) as running:

        def keys(query: str) -> list[str]:
            return [row["key"] for row in running.get(f"/api/v1/findings{query}").json["findings"]]

        assert sorted(keys("")) == ["straggler-1", "worse"]
        assert sorted(keys("?state=all")) == ["over", "straggler-1", "worse"]
        assert keys("?min_severity=critical") == ["worse"]
        assert keys("?condition=packet_loss") == []
        (row,) = running.get("/api/v1/findings?min_severity=critical").json["findings"]
        assert row["evidence"] == [
            {"capture": 0, "packets": [17, 42], "filter": "ip.src == 10.0.0.2", "unopenable": None}
        ]
        assert (row["condition"], row["since_ns"], row["confidence"]) == ("straggler", S, 0.95)
        assert row["advice"] == "look at the GPU of node1"


def test_a_window_is_a_whole_analysis(running: Running) -> None:
    schema = json.loads((DOCS / "analysis.schema.json").read_text())
    listed = running.get("/api/v1/windows?limit=2").json["windows"]
    assert [row["number"] for row in listed] == [4, 3]
    for number in ("latest", "3"):
        answer = running.get(f"/api/v1/windows/{number}")
        assert answer.headers["content-type"] == "application/json"
        jsonschema.validate(answer.json, schema)
        assert len(answer.json["collectives"]) == 4
    assert running.get("/api/v1/windows/99").status == 404


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/v1/nothing", 404, "Not Found"),
        ("/api/v1/collectives?limit=0", 400, "limit"),
        ("/api/v1/collectives?limit=many", 400, "limit"),
        ("/api/v1/collectives?limits=1", 400, "limits"),
        ("/api/v1/collectives?after=yesterday", 400, "yesterday"),
        ("/api/v1/collectives?op=sum", 400, "op"),
        ("/api/v1/findings?state=old", 400, "state"),
        ("/api/v1/findings?condition=stragler", 400, "one of admission_backlog, capture_loss, clock_untied"),
        ("/api/v1/events?events=windows", 400, "windows"),
        ("/api/v1/groups?x=1", 400, "x"),
        (f"/api/v1/windows/{'9' * 5000}", 400, "is no window's number"),
        ("/api/v1/windows/%C2%B2", 400, "is no window's number"),
        ("/api/v1/windows/1e3", 400, "is no window's number"),
        (f"/api/v1/collectives?after=run-{'9' * 5000}-1", 400, "is no key"),
        ("/api/v1/collectives?after=run-%C2%B2-1", 400, "is no key"),
        (f"/api/v1/transfers?after=run-1-{'9' * 5000}", 400, "is no key"),
        (f"/api/v1/collectives?since_ns={'9' * 5000}", 400, "since_ns"),
        (f"/api/v1/collectives?limit={'9' * 5000}", 400, "limit"),
    ],
)
def test_errors_are_problem_details(running: Running, path: str, status: int, words: str) -> None:
    answer = running.get(path)
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json")
    check("Problem", answer.json)
    assert answer.json["status"] == status
    assert words in answer.json["detail"]


@pytest.mark.parametrize("number", ["9" * 5000, "%C2%B2", "", "-1"])
def test_an_event_that_never_was_is_no_error(running: Running, number: str) -> None:
    """As if it had been forgotten: what is held is sent."""
    stream = running.parts._context.stream
    assert stream is not None
    assert stream.place(f"{stream._run}-{urllib.parse.unquote(number)}")[1] is None


def test_other_methods_are_refused_as_a_problem(running: Running) -> None:
    answer = running.pool.request("POST", running.url + "/api/v1/groups", retries=False)
    assert (answer.status, answer.headers["content-type"]) == (405, "application/problem+json")
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_a_failure_inside_is_an_answer_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    held = board()
    with serving(held) as running:
        monkeypatch.setattr(held, "groups", lambda: 1 / 0)
        answer = running.get("/api/v1/groups")
        assert (answer.status, answer.headers["content-type"]) == (500, "application/problem+json")
        assert running.get("/api/v1/lateness").status == 200
        assert held.health().errors["api"] == 1


def test_ready_only_with_results_about_now() -> None:
    held = Board()
    with serving(held) as running:
        assert (running.get("/healthz").status, running.get("/readyz").status) == (200, 503)
        held.publish(window(0))
        assert running.get("/readyz").json == {"status": "ok", "reasons": []}
        held.report(health(lag_s=1000.0))
        assert running.get("/readyz").json["reasons"] == ["results are 1000 s behind"]
        for interfaces in ({"p0": False}, {}):
            held.report(health(interfaces=interfaces))
            assert running.get("/readyz").json["reasons"] == ["no interface is being captured from"]
        assert running.get("/healthz").status == 200
        stream = running.parts._context.stream
        assert stream is not None
        end = time.monotonic() + 60
        answer = running.get("/healthz")
        while answer.status == 200 and time.monotonic() < end:  # until the last report has been heard
            time.sleep(0.05)
            stream.heard -= 60
            answer = running.get("/healthz")
        assert (answer.status, answer.json["status"]) == (503, "failing")


def test_the_configuration_is_shown_without_secrets(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("correct-horse-battery-staple\n")
    url = "https://user:pass@hooks.example.org/services/T0/B0/verysecret?key=1"
    hook = Webhook(url=url, token_file=str(secret), secret_file=str(secret))
    with serving(board(), webhooks=[hook]) as running:
        answer = running.get("/api/v1/config")
        assert answer.json["webhooks"][0]["url"] == "https://hooks.example.org/..."
        assert answer.json["webhooks"][0]["token_file"] == str(secret)
        everything = answer.body + running.get("/api/v1/health").body + running.get("/metrics").body
    for word in (b"correct-horse", b"verysecret", b"user:pass"):
        assert word not in everything


def test_requests_are_counted_by_route_not_by_path(running: Running) -> None:
    for number in range(5):
        running.get(f"/api/v1/windows/{number + 1000}")
        running.get(f"/no/such/path/{number}")
    text = running.get("/metrics").body.decode()
    assert 'dpuflow_api_requests_total{route="/api/v1/windows/{number}",status="404"}' in text
    assert "windows/1003" not in text  # the number alone may be part of a figure
    assert "such" not in text


@pytest.mark.parametrize("version", ["abc", "1.0.x", "1.0.0.0.0.0", "\xe9", "-1", ""])
def test_metrics_for_who_accepts_a_version_that_is_none(running: Running, version: str) -> None:
    """Answered by 500: the library compared a text with numbers. Found by fuzzing."""
    for media in ("text/plain", "application/openmetrics-text"):
        got = running.get("/metrics", Accept=f"{media}; version={version}; escaping={version}")
        assert got.status == 200
        assert b"dpuflow" in got.body


def test_metrics_are_compressed_and_openmetrics_where_asked_for(running: Running) -> None:
    answer = running.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")
    plain = running.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    small = running.pool.request(
        "GET", running.url + "/metrics", headers={"Accept-Encoding": "gzip"}, decode_content=False
    )
    assert small.headers["content-encoding"] == "gzip"
    assert len(small.data) < len(plain.body) / 3


def test_an_address_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(OptionError, match=rf"^api\.listen: 127\.0\.0\.1:{port}: Address already in use$"),
            serving(board(), Api(listen=f"127.0.0.1:{port}")),
        ):
            pass


def test_a_reload_that_cannot_be_keeps_the_old_configuration() -> None:
    held = board()
    with serving(held) as running, socket.create_server(("127.0.0.1", 0)) as taken:
        config = running.parts._config
        bad = replace(config, api=Api(listen=f"127.0.0.1:{taken.getsockname()[1]}"))
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        fixed = replace(config, api=Api(listen=f"127.0.0.1:{port}"))
        running.parts.reload(fixed)
        assert running.get("/healthz").status == 200
        with pytest.raises(OptionError):
            running.parts.reload(bad)
        assert running.get("/healthz").status == 200


@pytest.mark.parametrize("module", ["uvicorn", "starlette", "msgspec", "prometheus_client", "urllib3"])
def test_a_package_that_is_missing_is_one_sentence(module: str) -> None:
    script = f"""
import sys
sys.modules[{module!r}] = None
from dpuflow.agent import outlets
from dpuflow.agent.board import Board
from dpuflow.agent.config import Config, Webhook
from dpuflow.errors import MissingError
try:
    outlets.start(Board(), Config(webhooks=[Webhook(url="http://127.0.0.1:1/")]))
except MissingError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"the agent needs {module}")
    assert "pip install '.[agent]'" in done.stdout


def test_an_address_of_version_6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(board(), Api(listen="[::1]:0")) as running:
        running.url = running.url.replace("127.0.0.1", "[::1]")
        assert running.get("/healthz").status == 200


def test_the_agent_can_be_without_a_server() -> None:
    from dpuflow.agent import outlets
    from dpuflow.agent.config import Config

    parts = outlets.start(Board(), Config(api=Api(listen="off")))
    assert parts.server is None
    parts.close()
