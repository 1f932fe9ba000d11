"""Limits, budgets and providers: what `$HOTLAP_HOME/cloud.toml` may say, and how it is first written."""

from pydantic import Field

from hotlap.config_base import Config


class LimitsConfig(Config):
    max_slice_minutes: float = Field(default=5.0, gt=0)
    max_live_machines: int = Field(default=4, ge=1)


class BudgetConfig(Config):
    gpu_minutes_per_day: float = Field(default=60.0, ge=0)
    usd_per_day: float = Field(default=5.0, ge=0)
    gpu_minutes_per_run: float = Field(default=60.0, ge=0)
    usd_per_run: float = Field(default=5.0, ge=0)

    @property
    def gpu_s_per_day(self) -> int:
        return int(self.gpu_minutes_per_day * 60)

    @property
    def usd_micros_per_day(self) -> int:
        return round(self.usd_per_day * 1_000_000)

    @property
    def gpu_s_per_run(self) -> int:
        return int(self.gpu_minutes_per_run * 60)

    @property
    def usd_micros_per_run(self) -> int:
        return round(self.usd_per_run * 1_000_000)


class LedgerConfig(Config):
    url: str | None = None
    """Absent: a SQLite file in HOTLAP_HOME."""


class ReaperConfig(Config):
    period_minutes: float = Field(default=5.0, ge=1)
    owner: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._@-]{1,64}$")
    """Absent: the user's name on this machine."""


class GuardConfig(Config):
    train_beside_serving: bool = False


class LocalConfig(Config):
    usd_per_hour: float = Field(default=0.0, ge=0)
    num_gpus: int = Field(default=1, ge=0)

    @property
    def usd_micros_per_hour(self) -> int:
        return round(self.usd_per_hour * 1_000_000)


class SshConfig(Config):
    host: str | None = Field(default=None, pattern=r"^[^-\s][^\s]*$")
    """As `ssh` understands it: a name of its configuration, or user@host. Absent: there is no such box."""

    python: str = "python3"
    """The box's interpreter that has hotlap."""

    config_file: str | None = None
    """What `ssh` reads in the place of `~/.ssh/config`."""

    usd_per_hour: float = Field(default=0.0, ge=0)
    num_gpus: int = Field(default=1, ge=0)

    @property
    def usd_micros_per_hour(self) -> int:
        return round(self.usd_per_hour * 1_000_000)


DEFAULT_IMAGE = "runpod/pytorch@sha256:cb154fcca15d1d6ce858cfa672b76505e30861ef981d28ec94bd44168767d853"
"""Tag 2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04, as Docker Hub had it on 2026-09-02: Python 3.11, torch 2.8."""

DEFAULT_IMAGE_CUDA = "12.8"
"""What it asks of a machine's driver."""


class RunpodConfig(Config):
    image: str = DEFAULT_IMAGE
    """Container image for launches that name none, by its digest. It needs Python 3.11."""


_MODAL_USD_PER_HOUR = {
    "T4": 1.94,
    "L4": 2.15,
    "A10": 2.45,
    "L40S": 3.30,
    "A100-40GB": 3.45,
    "A100-80GB": 3.85,
    "H100": 5.30,
    "H200": 5.89,
    "B200": 7.60,
}
"""From modal.com/pricing as others quoted it from 2026-05-07 to 2026-10-08, a second: a GPU $0.000164 (T4), 0.000222,
0.000306, 0.000542, 0.000583, 0.000694, 0.001097, 0.001261, 0.001736 (B200); of a sandbox, which is dearer than a
function, a core $0.00003942 and a GiB $0.00000672, the higher of two figures. Rounded up to cents."""


class ModalConfig(Config):
    usd_per_hour: dict[str, float] = Field(default=_MODAL_USD_PER_HOUR)
    """Kinds of GPU, and what a sandbox with one, 4 cores and 32 GiB costs. Modal's API tells no prices."""

    prices_as_of: str = Field(default="2026-10-08", pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
    """The day of which they are."""

    region_factor: float | None = Field(default=None, ge=1)
    """By what they are multiplied where --data-center names a region. Absent: not known, so none may be named."""

    image: str = DEFAULT_IMAGE
    """As for RunPod."""


class CloudConfig(Config):
    limits: LimitsConfig = LimitsConfig()
    budget: BudgetConfig = BudgetConfig()
    ledger: LedgerConfig = LedgerConfig()
    reaper: ReaperConfig = ReaperConfig()
    guard: GuardConfig = GuardConfig()
    local: LocalConfig = LocalConfig()
    ssh: SshConfig = SshConfig()
    runpod: RunpodConfig = RunpodConfig()
    modal: ModalConfig = ModalConfig()


CLOUD_TOML = """\
# Limits of this machine's hotlap. Nothing but an edit of this file changes them: no flag, no --set, no environment.

[limits]
# The longest slice anybody may ask for, in minutes, from process start to exit.
max_slice_minutes = 5.0
# Machines that may be rented at the same time.
max_live_machines = 4

[budget]
# Per day (UTC), for everything that is rented; a launch is refused when its worst case does not fit any more.
gpu_minutes_per_day = 60.0
usd_per_day = 5.0
# Per run, over all its slices and days.
gpu_minutes_per_run = 60.0
usd_per_run = 5.0

[ledger]
# Where the money is written down. A team shares one budget through one database:
# url = "postgresql://user@host/hotlap"

[reaper]
# How often `hotlap reap` is run; the worst-case loss of a launcher that died depends on it.
period_minutes = 5.0
# Whose machines it may end; absent, those of this machine's user.
# owner = "you"

[guard]
# true: train although this machine serves a model. Think of those who wait for its answers.
train_beside_serving = false

[local]
# What `--on local` costs in the ledger, to rehearse a rented machine. 0 GPUs take nothing from the GPU-minutes.
usd_per_hour = 0.0
num_gpus = 1

[ssh]
# A box of your own for `--on ssh`, with hotlap installed, and a login that asks for no password:
# host = "me@box"
# The box's interpreter that has hotlap, such as hotlap/.venv/bin/python:
python = "python3"
# What it costs in the ledger, power and wear. 0 GPUs take nothing from the GPU-minutes.
usd_per_hour = 0.0
num_gpus = 1

[runpod]
# The container image for launches that name none: RunPod's own with Python 3.11 and torch 2.8. Another needs Python
# 3.11, and better torch too; a digest pins it.
image = "@IMAGE"

[modal]
image = "@IMAGE"
# Modal charges more where a region is named, by how much its pages say. Absent, --data-center is refused there:
# region_factor = 1.75
# What a sandbox with one of these, 4 cores and 32 GiB costs an hour: modal.com/pricing, its rates for sandboxes, as
# quoted by others until the day below. Modal's API tells no prices, so this list is what budgets are held by: compare
# it with that page, take every kind out that you do not want, and write the day on which you looked.
prices_as_of = "2026-10-08"
[modal.usd_per_hour]
T4 = 1.94
L4 = 2.15
A10 = 2.45
L40S = 3.3
"A100-40GB" = 3.45
"A100-80GB" = 3.85
H100 = 5.3
H200 = 5.89
B200 = 7.6
""".replace("@IMAGE", DEFAULT_IMAGE)
