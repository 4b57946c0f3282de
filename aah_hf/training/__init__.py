"""The paper's mechanism while a model trains: windows renewed step by step, and the retrofit of a trained model."""

from ..calibration.regimes import REGIMES, RegimeConfig, regime
from ..calibration.weights import Controllers, load_controllers, save_controllers
from .adaptive import AdaptiveWindows
from .callback import AAHCallback
from .decisions import DecisionLog, LayerDecision
from .retrofit import RetrofitConfig, retrofit

__all__ = [
    "REGIMES",
    "AAHCallback",
    "AdaptiveWindows",
    "Controllers",
    "DecisionLog",
    "LayerDecision",
    "RegimeConfig",
    "RetrofitConfig",
    "load_controllers",
    "regime",
    "retrofit",
    "save_controllers",
]
