"""Coefficients that are known for some hardware and models; for the rest there is the roofline.

Keys are (hardware, model, tensor-parallel degree); milliseconds.
"""

from planner.step_model import FittedModel

# Measured by DistServe's authors on A100-80G and fitted by them (github.com/LLMServe/DistServe at
# 82831f16, simdistserve/estimators/profile_data, Apache-2.0). Their prefill fit is in len^2, which
# is twice our pairs; their second decode fit holds above a batch of 95.
DISTSERVE = {
    ("a100", "opt-13b", 1): FittedModel(
        18.103, 0.10191, 1.4245e-05, 19.935, 0.038507, 0.00062694, 95, (7.1662, 0.15831, 0.0005798)
    ),
    ("a100", "opt-13b", 2): FittedModel(
        14.743,
        0.068577,
        4.8991e-06,
        13.295,
        0.062964,
        0.00034109,
        95,
        (10.639, 0.085629, 0.00031183),
    ),
    ("a100", "opt-13b", 4): FittedModel(
        12.062,
        0.038081,
        1.0452e-06,
        10.256,
        0.032693,
        0.00018787,
        95,
        (10.484, 0.045666, 0.00017121),
    ),
    ("a100", "opt-66b", 2): FittedModel(
        43.059, 0.27423, 4.4956e-05, 48.288, 0.12755, 0.00094243, 95, (28.728, 0.29618, 0.00047448)
    ),
    ("a100", "opt-66b", 3): FittedModel(
        32.998, 0.19568, 2.441e-05, 35.802, 0.095267, 0.0005845, 95, (22.654, 0.20851, 0.00053585)
    ),
    ("a100", "opt-66b", 4): FittedModel(
        29.442, 0.15135, 1.6635e-05, 30.76, 0.063284, 0.00045195, 95, (27.471, 0.12481, 0.00040468)
    ),
    ("a100", "opt-66b", 8): FittedModel(
        25.491,
        0.10659,
        6.7821e-06,
        23.155,
        0.048006,
        0.00022691,
        95,
        (21.718, 0.089786, 0.00037581),
    ),
}

# KV tokens of one worker, as DistServe found them (same source, max_num_tokens.csv).
DISTSERVE_KV_TOKENS = {
    ("a100", "opt-13b", 1): 66144,
    ("a100", "opt-13b", 2): 163008,
    ("a100", "opt-13b", 4): 356736,
    ("a100", "opt-66b", 2): 11600,
    ("a100", "opt-66b", 3): 45056,
    ("a100", "opt-66b", 4): 78496,
    ("a100", "opt-66b", 8): 212304,
}

# Fitted by planner/fit.py to step times that aiconfigurator 0.12.0 (PyPI, Apache-2.0) gives for
# vLLM in bf16. They are another model's output, made from measured kernels, not measured steps.
AICONFIGURATOR = {
    ("a100", "llama-3.1-70b", 4): FittedModel(
        19.722, 0.15197, 3.6443e-06, 27.687, 0.099622, 5.5946e-05
    ),  # errors: median 1.6%, largest 11%
    ("a100", "llama-3.1-70b", 8): FittedModel(
        15.533, 0.097794, 1.7419e-06, 17.311, 0.068176, 2.6768e-05
    ),  # errors: median 3.2%, largest 15%
    ("a100", "llama-3.1-8b", 1): FittedModel(
        7.6047, 0.054938, 2.9636e-06, 11.531, 0.029947, 8.4673e-05
    ),  # errors: median 1.4%, largest 17%
    ("a100", "llama-3.1-8b", 2): FittedModel(
        4.3833, 0.033021, 1.4781e-06, 6.6728, 0.020211, 4.3313e-05
    ),  # errors: median 1.9%, largest 12%
    ("a100", "qwen3-0.6b", 1): FittedModel(
        2.7008, 0.0053485, 1.2988e-06, 2.1546, 0.0037207, 7.4456e-05
    ),  # errors: median 3.5%, largest 18%
    ("a100", "qwen3-32b", 2): FittedModel(
        19.138, 0.12502, 5.9093e-06, 24.729, 0.082735, 8.5597e-05
    ),  # errors: median 1.9%, largest 15%
    ("a100", "qwen3-32b", 4): FittedModel(
        11.458, 0.073843, 2.9425e-06, 14.531, 0.044286, 4.4596e-05
    ),  # errors: median 2.5%, largest 11%
    ("h100", "llama-3.1-70b", 4): FittedModel(
        8.6473, 0.059747, 9.7691e-07, 15.202, 0.031778, 2.6649e-05
    ),  # errors: median 1.7%, largest 19%
    ("h100", "llama-3.1-70b", 8): FittedModel(
        7.4731, 0.038062, 4.7018e-07, 9.9584, 0.023755, 1.3463e-05
    ),  # errors: median 1.8%, largest 10%
    ("h100", "llama-3.1-8b", 1): FittedModel(
        3.3437, 0.019135, 8.1106e-07, 6.4071, 0.010648, 4.1998e-05
    ),  # errors: median 2.4%, largest 16%
    ("h100", "llama-3.1-8b", 2): FittedModel(
        2.6628, 0.012256, 3.9956e-07, 3.9825, 0.0076576, 2.0916e-05
    ),  # errors: median 1.8%, largest 17%
    ("h100", "qwen3-0.6b", 1): FittedModel(
        2.3643, 0.0017659, 3.4875e-07, 1.4172, 0.0038958, 3.731e-05
    ),  # errors: median 2.4%, largest 13%
    ("h100", "qwen3-32b", 2): FittedModel(
        8.4038, 0.04769, 1.6521e-06, 13.595, 0.025908, 4.2474e-05
    ),  # errors: median 2.0%, largest 23%
    ("h100", "qwen3-32b", 4): FittedModel(
        7.7214, 0.028582, 8.0046e-07, 8.3077, 0.019304, 2.1483e-05
    ),  # errors: median 2.3%, largest 10%
    ("h200", "llama-3.1-70b", 4): FittedModel(
        6.2312, 0.060202, 1.0438e-06, 12.219, 0.031414, 1.8586e-05
    ),  # errors: median 2.1%, largest 15%
    ("h200", "llama-3.1-70b", 8): FittedModel(
        6.1863, 0.037013, 5.0298e-07, 8.188, 0.024757, 9.6702e-06
    ),  # errors: median 2.0%, largest 9%
    ("h200", "llama-3.1-8b", 1): FittedModel(
        2.2856, 0.019521, 8.1526e-07, 4.9467, 0.011101, 2.9684e-05
    ),  # errors: median 2.3%, largest 18%
    ("h200", "llama-3.1-8b", 2): FittedModel(
        2.2022, 0.012082, 4.0361e-07, 3.3356, 0.0076071, 1.4798e-05
    ),  # errors: median 1.4%, largest 14%
    ("h200", "qwen3-0.6b", 1): FittedModel(
        2.2359, 0.0016668, 3.4272e-07, 1.4615, 0.0032978, 2.5997e-05
    ),  # errors: median 3.6%, largest 15%
    ("h200", "qwen3-32b", 2): FittedModel(
        6.6279, 0.047491, 1.6957e-06, 10.771, 0.023917, 2.9819e-05
    ),  # errors: median 2.1%, largest 17%
    ("h200", "qwen3-32b", 4): FittedModel(
        6.3579, 0.028662, 7.8476e-07, 6.934, 0.018322, 1.5152e-05
    ),  # errors: median 1.7%, largest 12%
}

FITTED = {**AICONFIGURATOR, **DISTSERVE}
