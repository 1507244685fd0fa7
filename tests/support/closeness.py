"""How far apart two right answers may be: the one bound of every test of exactness.

Processors and their libraries add in different orders, so a bound in logits fits the machine it was found on. In single
precision logits were seen to differ by up to 2e-6 of the largest of them, of hybrid models by 6e-6; one wrong token in
one head moves them by 1.5e-3 and more, which `test_closeness.py` looks at.
"""

from torch import Tensor

#: Of the largest number that is expected: what two right answers may differ by in single precision.
SHARE = 1e-4


def bound(expected: Tensor, share: float = SHARE) -> float:
    """What may differ from numbers like these; nan and infinities, of pads, do not count."""
    finite = expected[expected.isfinite()]
    return share * float(finite.abs().max()) if finite.numel() else 0.0


def assert_close(actual: Tensor, expected: Tensor, where: object = "", *, share: float = SHARE) -> None:
    """Numbers agree up to rounding, whatever the processor.

    Args:
        where: said in the message.
        share: of the largest number; another where precision is another, or where something must not be close.
    """
    assert actual.shape == expected.shape, f"{where}: {tuple(actual.shape)} and {tuple(expected.shape)}"
    if expected.numel():
        difference, most = float((actual - expected).abs().max()), bound(expected, share)
        assert difference <= most, f"{where}: logits differ by {difference:.2e}, which is more than {most:.2e}"
