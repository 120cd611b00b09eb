"""Costs read from the text of compiled programs, on excerpts of such texts."""

import pytest

from headcount.training.hlo_cost import Program, array_bytes


@pytest.mark.parametrize(
    "shapes, size",
    [
        ("f32[8,128]{1,0:T(8,128)}", 4096),
        ("f32[8,100]{1,0:T(8,128)}", 4096),  # padded to whole tiles
        ("bf16[100,12,8]{0,2,1:T(8,128)(2,1)}", 2 * 128 * 12 * 8),
        ("(f32[8]{0:T(128)}, f32[8,128]{1,0:T(8,128)S(1)})", 32),  # not of fast memory
        ("pred[7]", 7),
    ],
)
def test_bytes_of_arrays_in_memory(shapes, size):
    assert array_bytes(shapes) == size


LOOPS = """
%body (p: (f32[100], s32[])) -> (f32[100], s32[]) {
  %p = (f32[100]{0}, s32[]) parameter(0)
  %x = f32[100]{0} get-tuple-element(%p), index=0
  %y = f32[100]{0} add(%x, %x)
  %z = f32[100]{0} all-reduce(%y), channel_id=1, to_apply=%sum
  ROOT %t = (f32[100]{0}, s32[]) tuple(%z, %i)
}

%until (p: (f32[100], s32[])) -> pred[] {
  %last = s32[] constant(5)
  %i = s32[] get-tuple-element(%p), index=1
  ROOT %less = pred[] compare(%i, %last), direction=LT
}

%sliced (a: f32[64,100], i: s32[]) -> f32[1,100] {
  %a = f32[64,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,100]{1,0} dynamic-slice(%a, %i), dynamic_slice_sizes={1,100}
}

%written (a: f32[64,100], b: f32[1,100]) -> f32[64,100] {
  %a = f32[64,100]{1,0} parameter(0)
  %b = f32[1,100]{1,0} parameter(1)
  ROOT %u = f32[64,100]{1,0} dynamic-update-slice(%a, %b, %i)
}

ENTRY %main (a: f32[64,100]) -> f32[64,100] {
  %a = f32[64,100]{1,0} parameter(0)
  %i = s32[] constant(0)
  %part = f32[1,100]{1,0} fusion(%a, %i), kind=kLoop, calls=%sliced
  %whole = f32[64,100]{1,0} fusion(%a, %part), kind=kLoop, calls=%written
  %start = (f32[100]{0}, s32[]) tuple(%part, %i)
  %loop = (f32[100]{0}, s32[]) while(%start), condition=%until, body=%body KNOWN
  ROOT %end = f32[64,100]{1,0} negate(%whole)
}
"""


@pytest.mark.parametrize(
    "known, rounds",
    [("", 5), (', backend_config={"known_trip_count":{"n":"7"}}', 7)],
)
def test_traffic_and_communication_of_loops_count_per_iteration(known, rounds):
    """A fusion that uses a part of an array, or writes one, moves that part."""
    program = Program(LOOPS.replace(" KNOWN", known))
    moved = {"part": 400 + 400 + 4, "whole": 400 + 400, "end": 2 * 64 * 400}
    in_loop = (400 + 400) + (400 + 400)  # x is read once, though twice an operand
    assert program.collectives() == {"all-reduce": (rounds, rounds * 400)}
    traffic, operations = program.traffic()
    assert operations == 3 + 2 * rounds
    assert traffic == sum(moved.values()) + rounds * in_loop


def test_communication_in_loop_conditions_and_branches_counts():
    text = """
%body (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}

%until (x: f32[8]) -> pred[] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = pred[] all-reduce(%x), channel_id=3, to_apply=%any
}

%either (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %p = f32[8]{0} collective-permute(%x), channel_id=4
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %w = f32[8]{0} while(%x), condition=%until, body=%body
  ROOT %c = f32[8]{0} conditional(%i, %w, %w), branch_computations={%body, %either}
}
"""
    found = {"all-reduce": (1, 1), "collective-permute": (1, 32)}
    assert Program(text).collectives() == found


def test_communication_inside_a_fusion_counts():
    text = """
%fused (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%x), channel_id=3, to_apply=%sum
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%x), kind=kCustom, calls=%fused
}
"""
    assert Program(text).collectives() == {"all-reduce": (1, 32)}


@pytest.mark.parametrize(
    "shapes, size",
    [
        ("f32[8,128]{1,0:T(8,128)}", 4096),
        ("(bf16[2,3]{1,0}, s32[])", 16),
        ("u8[5]", 5),
        ("f8e4m3fn[4]", 4),
    ],
)
def test_bytes_of_shapes(shapes, size):
    text = f"%a = {shapes} all-reduce(%x), to_apply=%add"
    assert Program(text).collectives() == {"all-reduce": (1, size)}


def test_collectives_are_counted_once_each():
    text = """
      %a = f32[8]{0} all-reduce-start(%x), replica_groups={}
      %b = f32[8]{0} all-reduce-done(%a)
      ROOT %c = (f32[2,2]{1,0}, f32[]) all-reduce(%y, %z), to_apply=%add
      %d = f32[16]{0} all-gather(%x), dimensions={0}
    """
    assert Program(text).collectives() == {"all-reduce": (2, 52), "all-gather": (1, 64)}


def test_asynchronous_collectives_count_by_their_results():
    """As on a GPU: the start of an all-gather has its operands in front."""
    text = """
      %a = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), channel_id=1, dimensions={0}
      %b = f32[8]{0} all-gather-done(%a)
      %c = ((bf16[2]{0}, f32[2]{0}), (bf16[8]{0}, f32[8]{0})) all-gather-start(%x, %y)
      %d = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%x)
    """
    assert Program(text).collectives() == {
        "all-gather": (2, 32 + 16 + 32),
        "collective-permute": (1, 12),
    }


def test_collectives_of_one_channel_count_once():
    """As on a TPU, which computes while it communicates."""
    text = """
      %a = bf16[8]{0:T(8,128)} all-gather(%x), channel_id=4, dimensions={0}
      %b = bf16[8]{0:T(8,128)} all-gather(%y), channel_id=4, dimensions={0}
      %c = bf16[8]{0:T(8,128)} all-gather(%z), channel_id=2, dimensions={0}
      %d = f32[] all-reduce(%u), channel_id=4, to_apply=%add
    """
    found = {"all-gather": (2, 32), "all-reduce": (1, 4)}
    assert Program(text).collectives() == found
