"""Puts tables, fits and profiles together into what a simulation needs."""

from dataclasses import dataclass
from pathlib import Path

from planner.batch_worker import Limits
from planner.deployment import Link
from planner.fit import load_profile
from planner.fitted import DISTSERVE_KV_TOKENS, FITTED
from planner.hardware import degrees, find_hardware, find_model, kv_capacity
from planner.simulate import Machine
from planner.step_model import RooflineModel, StepModel

_TRANSFER_LATENCY_S = 0.002  # attach, commit record and release: a few round trips


@dataclass(frozen=True, slots=True)
class Capability:
    """A `Machine`, the tensor-parallel degrees that it covers, and where each one's step times
    come from."""

    machine: Machine
    degrees: tuple[int, ...]
    sources: dict[int, str]


def build(
    hardware_name: str,
    model_name: str,
    gpus: int,
    profile: Path | None = None,
    max_num_seqs: int = 256,
) -> Capability:
    """Step times by tensor-parallel degree: the profile's, else a known fit's, else the
    roofline's. Raises ConfigError for an unknown name and for a model that does not fit."""
    hardware, shape = find_hardware(hardware_name), find_model(model_name)
    models: dict[int, StepModel] = {}
    kv_tokens: dict[int, int] = {}
    sources: dict[int, str] = {}
    if profile is not None:
        measured, kv_tokens = load_profile(profile)
        models |= measured
        sources = dict.fromkeys(measured, f"profile {profile.name}")
    else:
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
    return Capability(machine, usable, {tp: sources[tp] for tp in usable})
