"""The client: what it sends, what it makes of answers, what it repeats and what it never repeats."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openapi
import pytest

from hotlap.cloud import boot, rental, runpod
from hotlap.cloud.provider import ListingBroken, Offer, Start, Tags, Where
from hotlap.cloud.quota import Quota
from hotlap.cloud.runpod import Runpod
from hotlap.cloud.runpod_shapes import EventReader, create_body, machine_of, problem_of
from hotlap.errors import (
    AmbiguousCreate,
    ConfigError,
    NoCapacity,
    NoFunds,
    NoPermission,
    NotCreated,
    ProviderFailed,
    RateLimited,
    UsageError,
)
from hotlap.testing.fake_clock import FakeClock
from hotlap.testing.fake_runpod import FakeRunpod
from hotlap.testing.faults import Fault

pytestmark = pytest.mark.long

CREATE, LIST, DELETE = "POST /v2/pods", "GET /v2/pods", "DELETE /v2/pods/{id}"
OFFER = Offer("runpod", "NVIDIA L40S", None, 860_000, cloud="SECURE")
TAGS = Tags("00aa" * 4, "me", "nonce", 1_800_000_400)
START = Start(("python3", "-c", "print(\"quoted 'words'\")"), {"HOTLAP_CAP_S": "100"}, image="img@sha256:0")


@pytest.fixture
def open_client() -> Iterator[Callable[..., tuple[Runpod, FakeRunpod]]]:
    opened: list[tuple[Runpod, FakeRunpod]] = []

    def start(*faults: Fault, key: str = "full-key", **options: Any) -> tuple[Runpod, FakeRunpod]:
        cloud = FakeRunpod(FakeClock(), faults=faults, **options)
        cloud.__enter__()
        opened.append((Runpod(key, cloud.url, sleep_s=cloud.advance), cloud))
        return opened[-1]

    yield start
    for client, cloud in opened:
        client.close()
        cloud.__exit__(None, None, None)


Open = Callable[..., tuple[Runpod, FakeRunpod]]

# --- what is sent ---


def test_the_body_is_exactly_this() -> None:
    body = create_body(OFFER, TAGS, START)
    assert body == {
        "name": "hotlap-00aa00aa00aa00aa",
        "image": "img@sha256:0",
        "cloud": "SECURE",
        "disk": 20,
        "cmd": ["python3", "-c", "print(\"quoted 'words'\")"],
        "gpu": {"id": "NVIDIA L40S", "count": 1},
        "env": {
            "HOTLAP_CAP_S": "100",
            "HOTLAP_LEASE": "00aa00aa00aa00aa",
            "HOTLAP_OWNER": "me",
            "HOTLAP_NONCE": "nonce",
            "HOTLAP_NOT_AFTER": "1800000400",
        },
    }


def test_volume_region_secret_and_cpu_have_their_fields() -> None:
    start = replace(START, volume_id="vol1", secret_refs={"HF_TOKEN": "hf"})
    body = create_body(replace(OFFER, gpu="cpu", region="US-KS-2"), TAGS, start, "http://127.0.0.1:9/v2")
    assert body["mounts"] == {"network": [{"volumeId": "vol1", "path": "/workspace"}]}
    assert body["dataCenterIds"] == ["US-KS-2"] and "gpu" not in body and body["cpu"]["vcpuCount"] >= 1
    env = body["env"]
    assert env["HF_TOKEN"] == "{{ RUNPOD_SECRET_hf }}" and env["HOTLAP_VOLUME"] == "/workspace"
    assert env["HOTLAP_RUNPOD_URL"] == "http://127.0.0.1:9/v2"


def test_no_setting_can_take_the_place_of_a_tag() -> None:
    env = create_body(OFFER, TAGS, replace(START, env={"HOTLAP_NOT_AFTER": "9999999999"}))["env"]
    assert env["HOTLAP_NOT_AFTER"] == str(TAGS.not_after_s)


@pytest.mark.skipif(not openapi.SPEC.exists(), reason="the provider's API file is not here; bodies above stand for it")
@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("POST", "/v2/pods", {"name": "n", "image": "i", "ttl": 5}, "ttl"),
        ("POST", "/v2/pods", {"name": "n", "image": "i", "disk": "20"}, "is not of type"),
        ("POST", "/v2/pods", {"name": "n", "image": "i", "cmd": [1]}, "no list of words"),
        ("POST", "/v2/pods", None, "body is required"),
        ("GET", "/v2/pods?status=RUNNING", None, "query status is unknown"),
        ("GET", "/v2/catalog/gpus?include=STOCK", None, "'STOCK' is not one of"),
        ("GET", "/v2/pods/x/logs?tail=9000", None, "9000 is greater"),
        ("DELETE", "/v2/pods", None, "no such operation"),
        ("POST", "/v2/pods/x/action", {"action": "explode"}, "is not one of"),
    ],
)
def test_the_file_finds_fault_with_what_is_wrong(method: str, path: str, body: Any, says: str) -> None:
    request = httpx.Request(method, f"https://api.runpod.io{path}", json=body)
    assert any(says in words for words in openapi.complaints(request)), openapi.complaints(request)


@pytest.mark.skipif(not openapi.SPEC.exists(), reason="the provider's API file is not here")
def test_what_boot_sends_to_end_its_machine_is_in_the_file() -> None:
    """Delete, else stop; `hold_against_the_file` sees the client only."""
    sent: list[tuple[str, str, bytes | None]] = []

    def call(method: str, url: str, key: str, action: bytes | None) -> int:
        sent.append((method, url, action))
        return 403

    before, boot._call = boot._call, call
    try:
        boot._end_machine("pod-7", "key", boot.Speaker(""))
    finally:
        boot._call = before
    assert [(method, action) for method, _, action in sent] == [("DELETE", None), ("POST", b"stop")]
    for method, url, action in sent:
        body = {"action": action.decode()} if action else None
        assert openapi.complaints(httpx.Request(method, url, json=body)) == []


@pytest.mark.parametrize("profile", ["2026-08", "2026-10"])
def test_the_command_arrives_whole(profile: str, open_client: Open) -> None:
    from hotlap.testing.containers import argv_of

    client, cloud = open_client(profile=profile)
    client.create(OFFER, TAGS, START)
    (pod,) = cloud.park.pods.values()
    assert argv_of(pod.body) == START.argv


@pytest.mark.parametrize(
    "url",
    [
        "http://api.runpod.io/v2",
        "http://10.0.0.1/v2",
        "http://127.0.0.1.evil.example/v2",
        "ftp://127.0.0.1/",
        "http://[",
        "",
    ],
)
def test_a_key_never_travels_in_the_clear(url: str) -> None:
    with pytest.raises(ConfigError, match="https"):
        Runpod("key", url)


def test_the_environment_names_key_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPermission, match="RUNPOD_API_KEY"):
        runpod.from_environment({})
    runpod.from_environment({"RUNPOD_API_KEY": "k", "HOTLAP_RUNPOD_URL": "http://localhost:1/v2"}).close()


# --- creating ---


@pytest.mark.parametrize(
    ("fault", "kind", "num_made"),
    [
        (Fault("drop_before", CREATE), AmbiguousCreate, 0),
        (Fault("drop_after", CREATE), AmbiguousCreate, 1),
        (Fault("status", CREATE, value=500), AmbiguousCreate, 0),
        (Fault("status_after", CREATE, value=500), AmbiguousCreate, 1),
        (Fault("html", CREATE, value=502), AmbiguousCreate, 0),
        (Fault("html_after", CREATE, value=504), AmbiguousCreate, 1),
        (Fault("truncate", CREATE), AmbiguousCreate, 1),
        (Fault("status", CREATE, value=409), AmbiguousCreate, 0),
        (Fault("status", CREATE, value=302), AmbiguousCreate, 0),
        (Fault("capacity", CREATE), NoCapacity, 0),
        (Fault("status", CREATE, value=400), NotCreated, 0),
        (Fault("status", CREATE, value=404), NotCreated, 0),
        (Fault("status", CREATE, value=410), NotCreated, 0),
        (Fault("status", CREATE, value=413), NotCreated, 0),
        (Fault("status", CREATE, value=422), NotCreated, 0),
        (Fault("status", CREATE, value=402), NoFunds, 0),
        (Fault("status", CREATE, value=401), NoPermission, 0),
        (Fault("status", CREATE, value=403), NoPermission, 0),
        (Fault("status", CREATE, value=429), RateLimited, 0),
    ],
    ids=lambda value: f"{value.kind}-{value.value:g}" if isinstance(value, Fault) else None,
)
def test_every_answer_to_a_create_has_its_meaning_and_is_sent_once(
    fault: Fault, kind: type[ProviderFailed], num_made: int, open_client: Open
) -> None:
    client, cloud = open_client(fault)
    with pytest.raises(ProviderFailed) as caught:
        client.create(OFFER, TAGS, START)
    assert type(caught.value) is kind
    assert len(cloud.calls(CREATE)) == 1 and len(cloud.park.pods) == num_made


def test_an_answer_too_late_is_a_doubt(open_client: Open) -> None:
    _, cloud = open_client(Fault("slow", CREATE, value=1.0))
    impatient = Runpod("full-key", cloud.url, timeout_s=0.2)
    with pytest.raises(AmbiguousCreate):
        impatient.create(OFFER, TAGS, START)
    impatient.close()
    assert len(cloud.calls(CREATE)) == len(cloud.park.pods) == 1


def test_nobody_there_is_a_definite_no() -> None:
    client = Runpod("full-key", "http://127.0.0.1:9/v2")
    with pytest.raises(NotCreated, match="nothing was sent"):
        client.create(OFFER, TAGS, START)
    client.close()


def test_a_retry_after_is_told(open_client: Open) -> None:
    client, _ = open_client(Fault("status", CREATE, value=429, retry_after_s=20.0))
    with pytest.raises(RateLimited) as caught:
        client.create(OFFER, TAGS, START)
    assert caught.value.retry_after_s == 20.0


# --- reading ---


def test_what_is_listed_becomes_a_machine(open_client: Open) -> None:
    client, cloud = open_client()
    made = client.create(OFFER, TAGS, START)
    cloud.advance(100.0)
    (machine,) = client.machines().machines
    assert machine.machine_id == made.machine_id and machine.is_ours and machine.state == "running" and machine.is_up
    assert machine.usd_micros_per_hour == 860_000 and machine.created_at_s == 1_800_000_000.0
    assert (machine.lease_id, machine.owner, machine.nonce) == (TAGS.lease_id, "me", "nonce")
    assert client.machines().now_s == cloud.now_s()


@pytest.mark.parametrize("fault", ["zero_cost", "null_cost"])
def test_a_price_that_cannot_be_is_none(fault: Any, open_client: Open) -> None:
    client, _ = open_client(Fault(fault))
    assert client.create(OFFER, TAGS, START).usd_micros_per_hour is None


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"status": "REBALANCING"}, lambda machine: machine.state == "unknown" and machine.problems),
        ({"runtime": {}}, lambda machine: not machine.is_up),
        ({"runtime": None}, lambda machine: not machine.is_up),
        ({"env": None}, lambda machine: not machine.is_ours and machine.is_doubtful),
        ({"name": "renamed"}, lambda machine: not machine.is_ours and machine.is_doubtful),
        ({"createdAt": "yesterday"}, lambda machine: machine.created_at_s == 5.0 and machine.problems),
        ({"cluster": {"id": "c", "rank": 0}}, lambda machine: "cluster" in machine.problems[0]),
        ({"cost": "free"}, lambda machine: machine.usd_micros_per_hour is None),
        ({"cost": 0.69}, lambda machine: machine.usd_micros_per_hour == 690_000),
    ],
)
def test_odd_entries(change: dict[str, Any], check: Callable[[Any], Any]) -> None:
    entry = {
        "id": "p",
        "name": TAGS.name,
        "status": "RUNNING",
        "env": TAGS.env,
        "cost": 0.86,
        "runtime": {"uptime": 1},
        "createdAt": "2027-01-15T08:00:00Z",
    }
    assert check(machine_of({**entry, **change}, 5.0))


def test_all_pages_are_read_and_ours_on_the_last_is_found(open_client: Open) -> None:
    client, cloud = open_client(per_minute=1000)
    for number in range(230):
        client.create(OFFER, Tags(f"{number:016x}", "me", "n", 1_800_000_400), START)
    cloud.advance(5.0)
    listing = client.machines()
    assert len(listing.machines) == 230 and len(cloud.calls(LIST)) == 3


def test_a_cursor_that_comes_again_is_an_error_that_holds_what_was_seen(open_client: Open) -> None:
    client, cloud = open_client(Fault("repeats_cursor", LIST), per_minute=1000)
    for number in range(230):
        client.create(OFFER, Tags(f"{number:016x}", "me", "n", 1_800_000_400), START)
    cloud.advance(5.0)
    with pytest.raises(ListingBroken) as caught:
        client.machines()
    assert len(caught.value.seen.machines) == 200 and caught.value.seen.now_s == cloud.now_s()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop_before", LIST, calls=(1, 2)),
        Fault("html", LIST, calls=(1, 2), value=502),
        Fault("status", LIST, calls=(1,), value=429, retry_after_s=20.0),
    ],
    ids=lambda fault: fault.kind,
)
def test_reads_are_repeated_with_growing_waits(fault: Fault, open_client: Open) -> None:
    client, cloud = open_client(fault)
    client.machines()
    times = [call.at_s for call in cloud.calls(LIST)]
    assert len(times) == len(fault.calls) + 1
    assert times[1] - times[0] >= (20.0 if fault.kind == "status" else 0.5)


def test_a_provider_that_is_down_is_a_failure_not_an_empty_list(open_client: Open) -> None:
    client, cloud = open_client(Fault("status", LIST, value=503))
    with pytest.raises(ProviderFailed, match="4 tries"):
        client.machines()
    assert len(cloud.calls(LIST)) == 4


@pytest.mark.parametrize("status", [401, 403])
def test_no_permission_is_said_at_once(status: int, open_client: Open) -> None:
    client, cloud = open_client(Fault("status", LIST, value=status))
    with pytest.raises(NoPermission, match="RUNPOD_API_KEY"):
        client.machines()
    assert len(cloud.calls(LIST)) == 1


def test_a_list_that_is_no_list_is_an_error(open_client: Open) -> None:
    client, _ = open_client(Fault("truncate", LIST))
    with pytest.raises(ProviderFailed):
        client.machines()


def test_offers_have_both_clouds_and_integers(open_client: Open) -> None:
    client, _ = open_client()
    offers = client.offers("NVIDIA L40S")
    assert [(offer.cloud, offer.usd_micros_per_hour) for offer in offers] == [
        ("COMMUNITY", 790_000),
        ("SECURE", 860_000),
    ]
    assert all(offer.has_stock for offer in offers)


# --- ending ---


def test_deleting_tells_accepted_from_unknown(open_client: Open) -> None:
    client, cloud = open_client()
    machine = client.create(OFFER, TAGS, START)
    assert client.terminate(machine.machine_id) is False  # not visible yet
    cloud.advance(5.0)
    assert client.terminate(machine.machine_id) is True
    cloud.advance(5.0)
    assert client.terminate(machine.machine_id) is False
    assert client.terminate("no/such?thing") is False


def test_a_locked_machine_is_unlocked_first(open_client: Open) -> None:
    client, cloud = open_client(Fault("locked", CREATE))
    machine = client.create(OFFER, TAGS, START)
    cloud.advance(5.0)
    assert client.terminate(machine.machine_id) is True and cloud.alive() == []


def test_a_cluster_s_member_cannot_be_ended_and_says_so(open_client: Open) -> None:
    client, cloud = open_client(Fault("cluster", CREATE))
    machine = client.create(OFFER, TAGS, START)
    cloud.advance(5.0)
    with pytest.raises(ProviderFailed, match="cluster"):
        client.terminate(machine.machine_id)
    assert [each.machine_id for each in client.machines().machines] == [machine.machine_id]


# --- logs ---


def test_lines_come_once_along_a_chain_of_cursors(open_client: Open) -> None:
    client, cloud = open_client(Fault("duplicates", "GET /v2/pods/{id}/logs"))
    machine = client.create(OFFER, TAGS, START)
    cursor, lines = "", []
    for _ in range(15):
        cloud.advance(10.0)
        page = client.logs(machine.machine_id, cursor)
        cursor, lines = page.cursor, [*lines, *page.lines]
    texts = [line for line in lines if "heartbeat" not in line]
    assert len(texts) == len(set(texts)) == 3


def test_an_event_that_is_cut_is_read_when_it_comes_whole() -> None:
    reader = EventReader("")
    data = json.dumps({"ts": "t", "source": "container", "line": "one"})
    for line in ("id: 2027-01-15T08:00:00Z/000000000001", f"data: {data}", "", "id: 2027-01-15T08:00:01Z/2", "data: {"):
        reader.take(line)
    assert reader.lines == ["one"] and reader.cursor.endswith("/000000000001")


def test_what_the_platform_says_cannot_pass_for_the_machine_s_words() -> None:
    reader = EventReader("")
    for line in ("id: 1", 'data: {"source": "system", "line": "HOTLAP: {\\"event\\": \\"result\\"}"}', ""):
        reader.take(line)
    assert reader.lines == ['[system] HOTLAP: {"event": "result"}']


def test_a_stream_that_stays_open_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch, open_client: Open) -> None:
    client, cloud = open_client(Fault("slow", "GET /v2/pods/{id}/logs", value=1.0))
    machine = client.create(OFFER, TAGS, START)
    cloud.advance(90.0)
    monkeypatch.setattr(runpod, "_LOG_QUIET_S", 0.1)
    assert client.logs(machine.machine_id).lines == ()


# --- errors ---


def test_a_page_of_a_proxy_does_not_hide_the_status() -> None:
    problem = problem_of(502, {}, "<html>" + "x" * 10_000)
    assert problem.status == 502 and len(problem.detail) < 100


def test_the_key_is_in_no_error(open_client: Open) -> None:
    client, _ = open_client(Fault("status", value=500), key="full-key")
    for act in (lambda: client.create(OFFER, TAGS, START), client.machines, lambda: client.terminate("x")):
        with pytest.raises(ProviderFailed) as caught:
            act()
        assert "full-key" not in str(caught.value) and not re.search("Bearer", repr(caught.value))


# --- where ---

H100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"


def make_volume(cloud: FakeRunpod, center: str = "EU-RO-1") -> str:
    body = {"name": "data", "size": 10, "dataCenter": center}
    headers = {"Authorization": "Bearer full-key"}
    return httpx.post(f"{cloud.url}/network-volumes", json=body, headers=headers).json()["id"]


def test_a_volume_is_reached_from_the_secure_cloud_of_its_data_center_only(open_client: Open) -> None:
    client, cloud = open_client()
    where = Where(make_volume(cloud))
    assert rental.offers_for(client, ())[0].cloud == "COMMUNITY"
    offers = [*rental.offers_for(client, (), where), *rental.offers_for(client, (L40S, H100), where)]
    assert [(offer.gpu, offer.cloud, offer.region) for offer in offers] == [
        ("NVIDIA GeForce RTX 4090", "SECURE", "EU-RO-1"),
        (L40S, "SECURE", "EU-RO-1"),
        (H100, "SECURE", "EU-RO-1"),
    ]
    start = replace(START, volume_id=where.volume_id)
    assert client.create(offers[1], TAGS, start).state == "provisioning"
    with pytest.raises(NotCreated, match="reached from the secure cloud in EU-RO-1 only"):
        client.create(replace(offers[1], region="US-KS-2"), TAGS, start)


def test_a_volume_s_data_center_without_such_a_gpu_fails_before_anything_is_held(open_client: Open) -> None:
    client, cloud = open_client()
    where = Where(make_volume(cloud))
    cloud.account.sold_out.add((H100, "EU-RO-1"))
    with pytest.raises(NoCapacity, match=f"lies in EU-RO-1, and there is no {H100} to be had there"):
        rental.offers_for(client, (H100,), where)
    assert [offer.has_stock for offer in rental.offers_for(client, (H100, L40S), where)] == [False, True]
    assert cloud.calls(CREATE) == []


def test_a_volume_that_is_nowhere_or_elsewhere_is_told(open_client: Open) -> None:
    client, cloud = open_client()
    with pytest.raises(UsageError, match="no network volume vol9"):
        client.offers(where=Where("vol9"))
    with pytest.raises(UsageError, match="lies in EU-RO-1, not in US-KS-2"):
        client.offers(where=Where(make_volume(cloud), ("US-KS-2",)))


def test_candidates_are_kinds_in_data_centers_in_the_order_asked_for(open_client: Open) -> None:
    client, cloud = open_client()
    cloud.account.sold_out.add((H100, "US-KS-2"))
    offers = rental.offers_for(client, (H100, L40S), Where(regions=("US-KS-2", "EU-RO-1")))
    assert [(offer.gpu, offer.region, offer.has_stock) for offer in offers] == [
        (H100, "US-KS-2", False),
        (H100, "EU-RO-1", True),
        (L40S, "US-KS-2", True),
        (L40S, "EU-RO-1", True),
    ]
    assert {offer.cloud for offer in offers} == {"SECURE"}
    with pytest.raises(NoCapacity):
        client.create(offers[0], TAGS, START)
    assert client.create(offers[1], TAGS, START).machine_id


def test_the_class_of_machines_can_be_chosen(open_client: Open) -> None:
    client, _ = open_client()
    assert {offer.cloud for offer in client.offers(where=Where(cloud="SECURE"))} == {"SECURE"}
    assert [offer.usd_micros_per_hour for offer in client.offers(L40S, Where(cloud="COMMUNITY"))] == [790_000]


# --- the quota ---


def test_looking_stays_within_the_quota_and_leaves_room_to_terminate(open_client: Open) -> None:
    """Two clients of one process read as fast as they can for three minutes: nobody is ever refused."""
    _, cloud = open_client(per_minute=60)
    turns = Quota(cloud.now_s, cloud.advance)
    clients = [Runpod("full-key", cloud.url, cloud.advance, turns=turns) for _ in range(2)]
    for number in range(120):
        clients[number % 2].machines()
        if number % 10 == 0:
            at_s = cloud.now_s()
            assert clients[0].terminate(f"p{number}") is False and cloud.now_s() == at_s
    for client in clients:
        client.close()
    assert {call.status for call in cloud.requests} == {200, 404}
    # 20 may leave at once; 30 a minute follow.
    assert cloud.now_s() - 1_800_000_000.0 == pytest.approx((120 - 20 + 12) * 2.0, abs=2.0)
    begun = [call.at_s for call in cloud.requests]
    assert max(sum(at_s <= other < at_s + 60.0 for other in begun) for at_s in begun) <= 60


def test_what_others_on_the_account_used_is_learned_from_an_answer() -> None:
    now = [0.0]

    def sleep_s(seconds: float) -> None:
        now[0] += seconds

    turns = Quota(lambda: now[0], sleep_s)
    turns.learn({"RateLimit": '"minute";r=4;t=60, "hour";r=2999;t=60'})
    turns.take(is_termination=True)
    assert now[0] == 0.0
    turns.take()
    assert now[0] == pytest.approx((11 - 3) * 2.0)
