"""All losses by the name that recipes use. A new one is a file of its own and one line here."""

from fledge.core.registry import Registry
from fledge.methods.losses.base import Loss

LOSSES: Registry[type[Loss]] = Registry(
    "objective.loss",
    {
        "ce": "fledge.methods.losses.cross_entropy:CrossEntropy",
        "kl": "fledge.methods.losses.kl:KLDivergence",
        "reverse_kl": "fledge.methods.losses.reverse_kl:ReverseKL",
        "js": "fledge.methods.losses.jensen_shannon:JensenShannon",
        "hard": "fledge.methods.losses.hard:HardCrossEntropy",
        "lk_alpha": "fledge.methods.losses.lk_alpha:LkAlpha",
        "lk_lambda": "fledge.methods.losses.lk_lambda:LkLambda",
        "tv": "fledge.methods.losses.total_variation:TotalVariation",
    },
)
_LK_TYPES = {"alpha": "lk_alpha", "lambda": "lk_lambda"}  # the names in trainer modules


def loss_of(
    loss: str | Loss,
    lk_loss_type: str | None = None,
    lk_kl_scale: float = 1.0,
    lk_kl_decay: float = 3.0,
) -> Loss:
    """The loss that a trainer module's arguments select: `lk_loss_type` replaces `loss`."""
    if lk_loss_type is not None and lk_loss_type not in _LK_TYPES:
        raise ValueError(f"lk_loss_type: 'alpha', 'lambda' or None, got {lk_loss_type!r}")
    if not 0 <= lk_kl_scale <= 1:
        raise ValueError(f"lk_kl_scale: must be in [0, 1], got {lk_kl_scale!r}")
    if not lk_kl_decay >= 0:
        raise ValueError(f"lk_kl_decay: must be >= 0, got {lk_kl_decay!r}")
    selected = lk_loss_type or loss
    if isinstance(selected, Loss):
        return selected
    name = _LK_TYPES.get(selected, selected)
    if name not in LOSSES:
        raise ValueError(f"loss: must be one of {tuple(LOSSES)}, got {loss!r}")
    parameters = {"scale": lk_kl_scale, "decay": lk_kl_decay} if name == "lk_lambda" else {}
    return LOSSES[name](**parameters)
