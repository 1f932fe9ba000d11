"""The emulator itself: states in time, profiles, keys, quotas, faults, the meter, and that answers fit the schema."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hotlap.testing.bodies import complaints
from hotlap.testing.fake_clock import FakeClock
from hotlap.testing.fake_runpod import FakeRunpod
from hotlap.testing.faults import Fault, fault_from
from hotlap.testing.meter import Meter

pytestmark = pytest.mark.long

SPEC = Path(__file__).parent.parent.parent / "shared" / "runpod" / "openapi-v2.json"
BODY: dict[str, Any] = {
    "name": "hotlap-a",
    "image": "img",
    "gpu": {"id": "NVIDIA L40S"},
    "env": {"HOTLAP_LEASE": "a", "HOTLAP_NOT_AFTER": "1800000600", "HOTLAP_CAP_S": "300", "HOTLAP_NONCE": "n"},
    "disk": 20,
}
L40S_USD_MICROS_PER_HOUR = 860_000


class Caller:
    """A client without any cleverness."""

    def __init__(self, cloud: FakeRunpod, key: str = "full-key") -> None:
        self.cloud = cloud
        self._http = httpx.Client(
            base_url=cloud.root, headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=5.0
        )

    def __call__(self, method: str, path: str, **given: Any) -> httpx.Response:
        return self._http.request(method, path, **given)

    def create(self, **changes: Any) -> dict[str, Any]:
        answer = self("POST", "/v2/pods", json={**BODY, **changes})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def listed(self) -> list[dict[str, Any]]:
        return self("GET", "/v2/pods").json()["pods"]

    def close(self) -> None:
        self._http.close()


@pytest.fixture
def open_cloud() -> Iterator[Callable[..., Caller]]:
    opened: list[Caller] = []

    def start(*faults: Fault, key: str = "full-key", **options: Any) -> Caller:
        cloud = FakeRunpod(FakeClock(), faults=faults, **options)
        cloud.__enter__()
        opened.append(Caller(cloud, key))
        return opened[-1]

    yield start
    for caller in opened:
        caller.close()
        caller.cloud.__exit__(None, None, None)


def test_a_machine_lives_through_its_states_and_is_metered_from_the_first(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud(per_minute=1000)
    pod = call.create()
    path = f"/v2/pods/{pod['id']}"
    assert pod["status"] == "PROVISIONING" and pod["runtime"] is None
    assert call("GET", path).status_code == 404 and call.listed() == []
    call.cloud.advance(0.5)
    assert call("GET", path).status_code == 200 and call.listed() == []
    seen: list[str] = []
    for _ in range(120):
        call.cloud.advance(1.0)
        seen.append(call("GET", path).json()["status"])
    assert list(dict.fromkeys(seen)) == ["PROVISIONING", "STARTING", "RUNNING"]
    assert call.cloud.meter.seconds(call.cloud.now_s(), pod["id"]) == 121


def test_deleting_is_accepted_at_once_and_shows_a_little_later(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    pod = call.create()
    call.cloud.advance(100.0)
    assert call("DELETE", f"/v2/pods/{pod['id']}").status_code == 204
    assert [entry["status"] for entry in call.listed()] == ["TERMINATED"]
    paid = call.cloud.usd_micros()
    call.cloud.advance(1.0)
    assert call("GET", f"/v2/pods/{pod['id']}").status_code == 404 and len(call.listed()) == 1
    call.cloud.advance(3.0)
    assert call.listed() == [] and call.cloud.usd_micros() == paid == -(-100 * L40S_USD_MICROS_PER_HOUR // 3600)


def test_the_job_ends_its_machine_with_the_machine_s_own_key(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    call.create()
    call.cloud.advance(300.0)
    assert call.cloud.alive() == []


@pytest.mark.parametrize(("allowed", "left"), [("stop", ["EXITED"]), ("nothing", ["RUNNING"])])
def test_a_machine_s_key_may_be_good_for_less(allowed: str, left: list[str], open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    call.cloud.account.pod_key_allows = allowed
    call.create()
    call.cloud.advance(300.0)
    assert [pod.status for pod in call.cloud.alive()] == left


def test_a_stopped_machine_still_pays_for_its_disk(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    pod = call.create()
    call.cloud.advance(90.0)
    call("POST", f"/v2/pods/{pod['id']}/action", json={"action": "stop"})
    call.cloud.advance(10.0)
    paid = call.cloud.usd_micros()
    call.cloud.advance(36_000.0)
    assert paid < call.cloud.usd_micros() < paid + 40_000
    assert call("POST", f"/v2/pods/{pod['id']}/action", json={"action": "restart"}).status_code == 409


def test_the_profiles_differ_in_command_fields_and_paging(open_cloud: Callable[..., Caller]) -> None:
    with_command = {**BODY, "cmd": ["job"]}
    old, new = open_cloud(profile="2026-08"), open_cloud(profile="2026-10")
    refused = old("POST", "/v2/pods", json=with_command)
    assert refused.status_code == 422 and "cmd" in refused.json()["detail"]
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert new("POST", "/v2/pods", json=with_command).status_code == 201
    assert "pagination" not in old("GET", "/v2/pods").json()
    assert new("GET", "/v2/pods").json()["pagination"] == {"hasNextPage": False, "nextCursor": None}
    large = {**with_command, "args": "x" * 110_000}
    assert new("POST", "/v2/pods", json=large).status_code == 413


def test_pages_follow_each_other(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    for number in range(5):
        call.create(name=f"hotlap-{number}")
    call.cloud.advance(5.0)
    names: list[str] = []
    cursor = None
    while True:
        answer = call("GET", "/v2/pods", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        names += [pod["name"] for pod in answer["pods"]]
        cursor = answer["pagination"]["nextCursor"]
        if not answer["pagination"]["hasNextPage"]:
            break
    assert names == [f"hotlap-{number}" for number in range(5)]


@pytest.mark.parametrize(
    ("key", "method", "path", "status"),
    [
        ("wrong", "GET", "/v2/pods", 401),
        ("read-key", "GET", "/v2/pods", 200),
        ("read-key", "POST", "/v2/pods", 403),
        ("full-key", "GET", "/v1/pods", 410),
        ("full-key", "GET", "/v2/nothing", 404),
        ("full-key", "GET", "/v2/pods/none", 404),
    ],
)
def test_keys_and_routes(key: str, method: str, path: str, status: int, open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud(key=key)
    assert call(method, path, **({"json": BODY} if method == "POST" else {})).status_code == status


def test_a_machine_s_key_opens_nothing_else(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    first, second = call.create(), call.create(name="hotlap-b")
    call.cloud.advance(5.0)
    theirs = {"Authorization": f"Bearer {call.cloud.park.pods[first['id']].key}"}
    assert call("DELETE", f"/v2/pods/{second['id']}", headers=theirs).status_code == 401
    assert call("GET", "/v2/pods", headers=theirs).status_code == 401
    assert call("DELETE", f"/v2/pods/{first['id']}", headers=theirs).status_code == 204


def test_the_quota_is_told_and_held(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud(per_minute=3)
    answers = [call("GET", "/v2/pods") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[0].headers["RateLimit-Policy"].startswith('"minute";q=3;w=60')
    assert answers[3].headers["Retry-After"] == "60"
    call.cloud.advance(61.0)
    assert call("GET", "/v2/pods").status_code == 200


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"surprise": 1}, 422),
        ({"name": ""}, 422),
        ({"disk": 0}, 422),
        ({"cloud": "ALL"}, 422),
        ({"env": {"A": 1}}, 422),
        ({"gpu": {"id": "NVIDIA L40S", "speed": 1}}, 422),
        ({"cpu": {"id": "cpu3c", "vcpuCount": 2}}, 400),
        ({"gpu": {"id": "a GPU that is not"}}, 400),
        ({"env": {f"V{number}": "" for number in range(51)}}, 400),
        ({"mounts": {"network": [{"volumeId": "none", "path": "/workspace"}]}}, 404),
    ],
)
def test_bodies_are_checked(change: dict[str, Any], status: int, open_cloud: Callable[..., Caller]) -> None:
    assert open_cloud()("POST", "/v2/pods", json={**BODY, **change}).status_code == status


def test_no_money_no_machine(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    call.cloud.account.balance_usd = 0.5
    assert call("POST", "/v2/pods", json=BODY).status_code == 402
    assert call.cloud.park.pods == {}


CREATE = "POST /v2/pods"


@pytest.mark.parametrize(
    ("fault", "seen", "num_made"),
    [
        (Fault("drop_before", CREATE), None, 0),
        (Fault("drop_after", CREATE), None, 1),
        (Fault("status", CREATE, value=500), 500, 0),
        (Fault("status_after", CREATE, value=500), 500, 1),
        (Fault("html", CREATE, value=502), 502, 0),
        (Fault("html_after", CREATE, value=504), 504, 1),
        (Fault("truncate", CREATE), None, 1),
        (Fault("capacity", CREATE), 400, 0),
        (Fault("twice", CREATE), 201, 2),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_faults_of_an_answer(fault: Fault, seen: int | None, num_made: int, open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud(fault)
    try:
        status = call("POST", "/v2/pods", json=BODY).status_code
    except httpx.TransportError:
        status = None
    assert (status, len(call.cloud.park.pods)) == (seen, num_made)


def test_faults_are_chosen_by_call_time_and_chance(open_cloud: Callable[..., Caller]) -> None:
    second = Fault("status", "GET /v2/pods", calls=(2,), value=500)
    later = Fault("status", "GET /v2/pods", from_s=100.0, until_s=200.0, value=503)
    call = open_cloud(second, later)
    assert [call("GET", "/v2/pods").status_code for _ in range(3)] == [200, 500, 200]
    call.cloud.advance(150.0)
    assert call("GET", "/v2/pods").status_code == 503
    call.cloud.advance(100.0)
    assert call("GET", "/v2/pods").status_code == 200
    often = open_cloud(Fault("status", "GET /v2/pods", probability=0.5, value=500), per_minute=1000)
    failures = sum(often("GET", "/v2/pods").status_code == 500 for _ in range(60))
    assert 15 <= failures <= 45
    with pytest.raises(ValueError, match="colour"):
        fault_from({"kind": "status", "colour": "red"})


def test_a_late_commit_is_cut_now_and_there_later(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud(Fault("commit_late", CREATE, value=90.0))
    with pytest.raises(httpx.TransportError):
        call("POST", "/v2/pods", json=BODY)
    call.cloud.advance(80.0)
    assert call.cloud.alive() == [] and call.cloud.usd_micros() == 0
    call.cloud.advance(15.0)
    assert len(call.cloud.alive()) == 1 and call.cloud.usd_micros() > 0


def test_a_container_that_exits_is_started_again_with_the_same_id(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud(Fault("restarts", CREATE, value=20.0))
    pod = call.create()
    boots: list[str] = []
    while len(boots) < 2:
        call.cloud.advance(5.0)
        boots = [line for line in _log(call, pod["id"]) if '"boot"' in line]
    refusals = [line for line in _log(call, pod["id"]) if '"refused"' in line]
    assert len(boots) == 2 and len(refusals) == 1 and "again" in refusals[0]
    assert sum(line == "the job runs" for line in _log(call, pod["id"])) == 1


def _log(call: Caller, pod_id: str, **headers: str) -> list[str]:
    text = call("GET", f"/v2/pods/{pod_id}/logs", headers=headers).text
    return [json.loads(line[6:])["line"] for line in text.splitlines() if line.startswith("data: ")]


def test_a_log_resumes_after_its_cursor(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    pod = call.create()
    call.cloud.advance(100.0)
    text = call("GET", f"/v2/pods/{pod['id']}/logs").text
    cursors = [line[4:] for line in text.splitlines() if line.startswith("id: ")]
    assert len(cursors) >= 3
    every = _log(call, pod["id"])
    assert _log(call, pod["id"], **{"Last-Event-ID": cursors[1]}) == every[2:]
    tail = call("GET", f"/v2/pods/{pod['id']}/logs", params={"tail": 1}).text
    assert tail.count("data: ") == 1


def test_billing_lags_an_hour_and_the_balance_is_only_in_graphql(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    call.create()
    call.cloud.advance(200.0)
    paid = call.cloud.usd_micros()
    assert call("GET", "/v2/billing/pods").json()["records"] == []
    call.cloud.advance(3700.0)
    (record,) = call("GET", "/v2/billing/pods").json()["records"]
    assert round(record["totalAmount"] * 1e6) == paid
    query = {"query": "query { myself { clientBalance } }"}
    assert call("POST", "/graphql", json=query).json()["data"]["myself"]["clientBalance"] == 25.0


def test_volumes_are_made_listed_and_removed(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    made = call("POST", "/v2/network-volumes", json={"name": "v", "size": 20, "dataCenter": "US-KS-2"}).json()
    assert call("GET", "/v2/network-volumes").json()["networkVolumes"] == [made]
    mounts = {"network": [{"volumeId": made["id"], "path": "/workspace"}]}
    assert call.create(mounts=mounts)["mounts"] == mounts
    assert call("DELETE", f"/v2/network-volumes/{made['id']}").status_code == 204
    assert call("DELETE", f"/v2/network-volumes/{made['id']}").status_code == 404


def test_another_process_has_the_clock_and_the_meter(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    call.create()
    before = call("GET", "/_ctl/clock").json()
    assert call("POST", "/_ctl/advance", json={"seconds": 60}).json() == before + 60
    assert call("GET", "/_ctl/meter").json()["usd_micros"] == call.cloud.usd_micros() > 0
    assert call("POST", "/_ctl/faults", json=[{"kind": "status", "route": "GET /v2/pods", "value": 500}]).json() == 1
    assert call("GET", "/v2/pods").status_code == 500
    assert [row[1] for row in call("GET", "/_ctl/requests").json()] == [CREATE, "GET /v2/pods"]
    assert len(call("GET", "/_ctl/pods").json()) == 1


def test_what_is_recorded_holds_no_environment(open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    call.create(env={**BODY["env"], "TOKEN": "planted-secret"})
    assert "planted-secret" not in repr(call.cloud.requests)


def test_the_same_seed_is_the_same_cloud(open_cloud: Callable[..., Caller]) -> None:
    def story(seed: int) -> list[object]:
        call = open_cloud(seed=seed)
        pod = call.create()
        call.cloud.advance(100.0)
        return [pod["id"], _log(call, pod["id"]), call.cloud.usd_micros()]

    assert story(3) == story(3) != story(4)


def test_the_meter_counts_begun_seconds_and_then_only_the_disk() -> None:
    meter = Meter()
    meter.begin("a", 100.0, 3_600_000, disk_gb=10)
    assert meter.usd_micros(99.0) == 0
    assert meter.usd_micros(100.2) == 1000
    meter.stop_computing("a", 160.0)
    assert meter.usd_micros(160.0) == 60_000
    meter.end("a", 160.0 + 3600.0)
    assert meter.usd_micros(1e9) == 60_000 + 1390
    meter.begin("a", 5000.0, 3_600_000, disk_gb=10)
    assert meter.usd_micros(5010.0) == 60_000 + 1390 + 10_000


# --- against the copied specification ---


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    if not SPEC.exists():
        pytest.skip("the provider's API file is not here; the hand-written checks above stand for it")
    return json.loads(SPEC.read_text())


def _errors(spec: dict[str, Any], name: str, value: object) -> list[str]:
    from jsonschema import Draft202012Validator

    schema = {"$ref": f"#/components/schemas/{name}", "components": spec["components"]}
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"surprise": 1},
        {"name": ""},
        {"disk": 0},
        {"disk": "20"},
        {"cloud": "ALL"},
        {"cloud": "COMMUNITY"},
        {"env": {"A": 1}},
        {"gpu": {"id": "x", "speed": 1}},
        {"gpu": {"count": 1}},
        {"gpu": {"id": "x", "minCudaVersion": "twelve"}},
        {"mounts": {"network": [{"volumeId": "v"}]}},
        {"mounts": {"network": [{"volumeId": "v", "path": "/w"}]}},
        {"mounts": {"other": 1}},
        {"cmd": ["x"]},
        {"args": "x", "ports": ["22/tcp"], "dataCenterIds": ["US-KS-2"], "registry": None},
    ],
    ids=json.dumps,
)
def test_our_check_of_bodies_is_the_specification_s(spec: dict[str, Any], change: dict[str, Any]) -> None:
    body = {**BODY, **change}
    assert bool(complaints(body, "2026-08")) == bool(_errors(spec, "CreatePodRequest", body))


def test_answers_fit_the_specification(spec: dict[str, Any], open_cloud: Callable[..., Caller]) -> None:
    call = open_cloud()
    pod = call.create()
    call.cloud.advance(100.0)
    after = call("GET", f"/v2/pods/{pod['id']}").json()
    assert after["runtime"]
    call.cloud.advance(3700.0)
    gpus = call("GET", "/v2/catalog/gpus", params={"include": "AVAILABILITY"}).json()
    for name, value in (
        ("Pod", pod),
        ("Pod", after),
        ("ListPodsResponse", call("GET", "/v2/pods").json()),
        ("ListGpuTypesResponse", gpus),
        ("ListDataCentersResponse", call("GET", "/v2/catalog/datacenters").json()),
        ("ErrorResponse", call("GET", "/v2/pods/none").json()),
        ("PodBillingRecord", call("GET", "/v2/billing/pods").json()["records"][0]),
    ):
        assert _errors(spec, name, value) == [], name
