"""Decoding over shards: policies, their transforms, searches and diagnostics; no step gathers the logits."""

from vocab_parallel.decode.diagnostics.calibration import FittedTemperature, fit_temperature, reliability
from vocab_parallel.decode.diagnostics.diagnostics import Diagnostics, diagnose
from vocab_parallel.decode.diagnostics.lens import LayerReadings, logit_lens
from vocab_parallel.decode.diagnostics.reliability import Reliability
from vocab_parallel.decode.diagnostics.translator import Translator, fit_translator
from vocab_parallel.decode.policy import Edge, Policy
from vocab_parallel.decode.presets import PRESETS, hugging_face, llama_cpp, vllm
from vocab_parallel.decode.rollout import Advance, rollout
from vocab_parallel.decode.running import Fallback
from vocab_parallel.decode.search.beam import BeamStep, beam_step, beam_step_scores, split_flat
from vocab_parallel.decode.search.beam_search import BeamResult, beam_search
from vocab_parallel.decode.search.best_first import BestFirstResult, Hypothesis, best_first_search
from vocab_parallel.decode.search.hypotheses import Coverage, LengthPenalty
from vocab_parallel.decode.search.reordering import reorder
from vocab_parallel.decode.search.searching import Model, Stepped
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.stepping import Step
from vocab_parallel.decode.trace import StepTrace
from vocab_parallel.decode.transforms.constraints import Fsm, StateMachine, advance
from vocab_parallel.decode.transforms.contrast import (
    Candidates,
    Contrastive,
    Dola,
    contrastive_candidates,
    contrastive_select,
)
from vocab_parallel.decode.transforms.controllers import DynamicTemperature, MirostatV2
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.penalties import RecentPenalties
from vocab_parallel.decode.transforms.processors import (
    BadWords,
    Bias,
    Force,
    FrequencyPenalty,
    MinLength,
    NoRepeatNgram,
    PresencePenalty,
    Prior,
    RepetitionPenalty,
    Suppress,
)
from vocab_parallel.decode.transforms.sequence import MaskedSum, masked_sum
from vocab_parallel.decode.transforms.transform import Choice, Transform, View
from vocab_parallel.decode.transforms.warpers import (
    Epsilon,
    Eta,
    MinP,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)

__all__ = [
    "PRESETS",
    "Advance",
    "BadWords",
    "BeamResult",
    "BeamStep",
    "BestFirstResult",
    "Bias",
    "Candidates",
    "Choice",
    "Contrastive",
    "Coverage",
    "Diagnostics",
    "Dola",
    "DynamicTemperature",
    "Edge",
    "Epsilon",
    "Eta",
    "Fallback",
    "FittedTemperature",
    "Force",
    "FrequencyPenalty",
    "Fsm",
    "Hypothesis",
    "LayerReadings",
    "LengthPenalty",
    "MaskedSum",
    "MinLength",
    "MinP",
    "MirostatV2",
    "Model",
    "NoRepeatNgram",
    "Normalize",
    "Policy",
    "PolicyState",
    "PresencePenalty",
    "Prior",
    "RecentPenalties",
    "Reliability",
    "RepetitionPenalty",
    "StateMachine",
    "Step",
    "StepTrace",
    "Stepped",
    "Suppress",
    "Temperature",
    "TopK",
    "TopNSigma",
    "TopP",
    "Transform",
    "Translator",
    "Typical",
    "View",
    "advance",
    "beam_search",
    "beam_step",
    "beam_step_scores",
    "best_first_search",
    "contrastive_candidates",
    "contrastive_select",
    "diagnose",
    "fit_temperature",
    "fit_translator",
    "hugging_face",
    "llama_cpp",
    "logit_lens",
    "masked_sum",
    "reliability",
    "reorder",
    "rollout",
    "split_flat",
    "vllm",
]
