"""Puts tables, fits and profiles together into what a simulation needs."""

from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError
from planner.batch_worker import Limits
from planner.deployment import Link
from planner.fitted import DISTSERVE_KV_TOKENS, FITTED
from planner.hardware import degrees, find_hardware, find_model, kv_capacity
from planner.profile import Profile, load_profile
from planner.simulate import Machine
from planner.step_model import RooflineModel, StepModel

_TRANSFER_LATENCY_S = 0.002  # attach, commit record and release: a few round trips


@dataclass(frozen=True, slots=True)
class Capability:
    """A `Machine`, the tensor-parallel degrees that it covers, and where each one's step times
    come from. `model`: a name that a deployment's YAML takes."""

    model: str
    machine: Machine
    degrees: tuple[int, ...]
    sources: dict[int, str]
    max_num_seqs: int = 256
    is_measured: bool = False


def build(
    hardware_name: str, model_name: str | None, gpus: int, max_num_seqs: int = 256
) -> Capability:
    """`hardware_name`: of the tables, or a file that `pdserve profile` wrote, which knows its
    model. Step times by tensor-parallel degree: measured, else a known fit's, else the
    roofline's. Raises ConfigError for an unknown name and for a model that does not fit."""
    if Path(hardware_name).suffix == ".json":
        return _measured(Path(hardware_name), model_name, gpus)
    if model_name is None:
        raise ConfigError(f"hardware {hardware_name}: say which model with --model")
    hardware, shape = find_hardware(hardware_name), find_model(model_name)
    models: dict[int, StepModel] = {}
    kv_tokens: dict[int, int] = {}
    sources: dict[int, str] = {}
    for tp in degrees(shape, hardware, hardware.per_node):
        key = (hardware.name, shape.name, tp)
        models[tp] = FITTED.get(key) or RooflineModel(hardware, shape, tp)
        kv_tokens[tp] = DISTSERVE_KV_TOKENS.get(key) or kv_capacity(hardware, shape, tp)
        sources[tp] = "fitted" if key in FITTED else "roofline"
    usable = tuple(sorted(tp for tp in models if tp <= gpus and kv_tokens[tp] > 0))
    machine = Machine(
        model_of=lambda _, tp: models[tp],
        limits_of=lambda _, tp: Limits(kv_tokens[tp], max_num_seqs),
        link_of=lambda tp: Link(
            # Each GPU of a worker has a network port of its own.
            hardware.network_bandwidth * tp,
            _TRANSFER_LATENCY_S,
            shape.kv_bytes_per_token,
        ),
    )
    return Capability(model_name, machine, usable, {tp: sources[tp] for tp in usable}, max_num_seqs)


def machine_of(profile: Profile) -> Machine:
    return Machine(
        model_of=lambda _, tp: profile.steps[tp],
        limits_of=lambda _, tp: Limits(profile.kv_tokens[tp], profile.max_num_seqs),
        link_of=lambda tp: Link(
            profile.link_bytes_per_s * tp, profile.hand_over_s, profile.kv_bytes_per_token
        ),
        slowdown=profile.slowdown,
        dispatch_s=profile.dispatch_s,
    )


def _measured(path: Path, model_name: str | None, gpus: int) -> Capability:
    profile = load_profile(path)
    if model_name not in (None, profile.model):
        raise ConfigError(f"{path} was measured with {profile.model}, not with {model_name}")
    usable = tuple(sorted(tp for tp in profile.steps if tp <= gpus))
    sources = {tp: f"measured, {path.name}" for tp in usable}
    return Capability(
        profile.model, machine_of(profile), usable, sources, profile.max_num_seqs, is_measured=True
    )
