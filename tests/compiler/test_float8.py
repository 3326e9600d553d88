"""float8 codes to float32: every code, in every shape, as torch casts it."""

import torch

from dsc.compiler.float8 import e4m3_to_float32, has_nan

CODES = torch.arange(256, dtype=torch.uint8)
FINITE = CODES[(CODES & 0x7F) != 0x7F].view(torch.float8_e4m3fn)


def test_every_code_has_the_bits_of_torchs_cast() -> None:
    assert torch.equal(e4m3_to_float32(FINITE).view(torch.int32), FINITE.to(torch.float32).view(torch.int32))
    everything = CODES.view(torch.float8_e4m3fn)
    assert torch.equal(e4m3_to_float32(everything).isnan(), everything.to(torch.float32).isnan())


def test_shapes_and_views() -> None:
    matrix = FINITE.repeat(3)[:750].view(30, 25)
    for codes in (matrix, matrix[3:7], matrix[:, 5:9], matrix[0, 0], matrix[:0]):
        made = e4m3_to_float32(codes)
        assert made.shape == codes.shape
        assert torch.equal(made, codes.to(torch.float32))
    before = matrix.view(torch.uint8).clone()
    e4m3_to_float32(matrix).zero_()
    assert torch.equal(matrix.view(torch.uint8), before)


def test_nan_of_either_sign_is_seen_and_kept() -> None:
    for code in (0x7F, 0xFF):
        codes = torch.tensor([1, code, 0x80], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert has_nan(codes)
        assert e4m3_to_float32(codes).isnan().tolist() == [False, True, False]
    assert not has_nan(FINITE)
    assert not has_nan(FINITE[:0])
