"""The CUDA kernels around the cache and between the layers against float64 references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oasiskv import _core
from reference.cuda import DTYPES, NAN, SMALL, ints, needs_gpu, relative_error, stream

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("norm", [False, True])
def test_append(dtype: str, dim: int, norm: bool) -> None:
    torch.manual_seed(dim + norm)
    heads, group, rows, pages = 2, 3, 21, 9
    t, hq = DTYPES[dtype], heads * group
    qkv = torch.randn(rows, (hq + 2 * heads) * dim, device="cuda").to(t)
    positions = torch.randperm(pages * 16)[:rows]
    table = [(int(p), int(p) // 16, i // 2 if i % 2 else -1, 3, i % 2) for i, p in enumerate(positions)]
    table[4] = (-1, 0, -1, 0, 0)
    angles = torch.rand(pages * 16, dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    weights = [torch.rand(dim, device="cuda").to(t) + 0.5 for _ in range(2)]
    q = torch.full((rows, hq, dim), NAN, dtype=t, device="cuda")
    staged = torch.full((rows, hq, dim), NAN, dtype=t, device="cuda")
    pool = torch.full((pages, heads, 2, 16, dim), NAN, dtype=t, device="cuda")
    keep, copies = ints(table), ints([7])
    _core.cuda.append(
        dtype=dtype, num_kv_heads=heads, group=group, head_dim=dim, qkv=qkv.data_ptr(), rows=keep.data_ptr(), cos=cos.data_ptr(),
        sin=sin.data_ptr(), q_norm=weights[0].data_ptr() if norm else 0, k_norm=weights[1].data_ptr() if norm else 0, norm_eps=1e-6,
        q=q.data_ptr(), staged=staged.data_ptr(), pool=pool.data_ptr(), num_copies=copies.data_ptr(), num_rows=rows,
        stream=stream(),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert int(copies) == 0
    x = qkv.double().view(rows, hq + 2 * heads, dim)
    written = torch.zeros(pool.shape[:4], dtype=torch.bool)
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]

    def rotated(row: int, head: int, weight: torch.Tensor) -> torch.Tensor:
        v = x[row, head]
        if norm:
            v = v / (v.square().mean() + 1e-6).sqrt() * weight.double()
        a, b, position = v[: dim // 2], v[dim // 2 :], table[row][0]
        c, s = cos[position].double(), sin[position].double()
        return torch.cat([a * c - b * s, b * c + a * s])

    for row, (position, page, to, *_) in enumerate(table):
        if position < 0:
            assert torch.isnan(q[row]).all()
            continue
        for head in range(hq):
            expected = rotated(row, head, weights[0])
            assert relative_error(q[row, head], expected) < tolerance
            if to >= 0:
                assert torch.equal(staged[to, head], q[row, head])
        for h in range(heads):
            assert relative_error(pool[page, h, 0, position % 16], rotated(row, hq + h, weights[1])) < tolerance
            assert torch.equal(pool[page, h, 1, position % 16], qkv.view(rows, -1, dim)[row, hq + heads + h])
            written[page, h, :, position % 16] = True
    assert torch.isnan(pool[~written.cuda()]).all()
    assert torch.isnan(staged[[i for i in range(rows) if i not in {s for _, _, s, *_ in table}]]).all()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", ["mean_std", "minmax", "halves"])
def test_settle_and_write_through(dtype: str, kind: str) -> None:
    rng = np.random.default_rng(len(dtype) * len(kind))
    torch.manual_seed(1)
    t = DTYPES[dtype]
    for dim in (64, 128):
        heads, top_k, requests, summary_stride, pages = 3, 9, 4, 3, 60
        layers = torch.randn(2, pages, heads, 2, 16, dim, device="cuda").to(t)
        pool, was = layers[0], layers.cpu()
        before = pool.clone()
        summaries = torch.full((requests * summary_stride, heads, 64, 2, dim), NAN, dtype=t, device="cuda")
        slot_blocks = torch.tensor(np.stack([[rng.permutation(120)[:top_k] for _ in range(heads)] for _ in range(requests)]), device="cuda")
        slot_steps = torch.tensor(rng.integers(5, 9, (requests, heads, top_k)), device="cuda")
        slot_blocks, slot_steps = slot_blocks.int(), slot_steps.int()
        was_blocks, was_steps = slot_blocks.clone(), slot_steps.clone()
        slot_pages = torch.arange(requests * top_k, dtype=torch.int32, device="cuda").view(requests, top_k)
        summary_pages = torch.randperm(requests * summary_stride, dtype=torch.int32, device="cuda").view(requests, summary_stride)
        # request, block, page, slots in use, grows: dense twice, a full working set, one with a free slot
        settled = [(0, 0, 40, -1, 0), (0, 65, 41, -1, 0), (1, 127, 42, top_k, 0), (3, 191, 43, top_k - 2, 1)]
        step = torch.tensor([77], device="cuda")
        host_step, host_offset, stride = 4, 1, 800
        units = requests * stride
        host = torch.full((units, heads, 2, 16, dim), 7.0, dtype=t).pin_memory()
        host_units = torch.randperm(units, dtype=torch.int32, device="cuda").view(requests, stride)
        lists, count = ints(settled), ints([len(settled)])
        _core.cuda.settle(
            dtype=dtype, num_kv_heads=heads, group=1, head_dim=dim, kind=kind, top_k=top_k, blocks=lists.data_ptr(),
            num_blocks=count.data_ptr(), pool=pool.data_ptr(), summaries=summaries.data_ptr(), summary_pages=summary_pages.data_ptr(),
            summary_stride=summary_stride, slot_blocks=slot_blocks.data_ptr(), slot_steps=slot_steps.data_ptr(),
            slot_pages=slot_pages.data_ptr(), slot_stride=top_k, step=step.data_ptr(),
            max_blocks=len(settled) + 2, stream=stream(),
        )  # fmt: skip
        _core.cuda.write_through(
            num_kv_heads=heads, group=1, head_dim=dim, element_bytes=t.itemsize, layers=2, blocks=lists.data_ptr(),
            num_blocks=count.data_ptr(), pool=layers.data_ptr(), layer_bytes=pool.numel() * t.itemsize,
            host_units=host_units.data_ptr(), host_stride=stride, host_step=host_step, host_offset=host_offset, host_base=host.data_ptr(),
            num_ctas=2, stream=stream(),
        )  # fmt: skip
        torch.cuda.synchronize()
        touched = set()
        for request, block, page, slots, grows in settled:
            keys = before[page, :, 0].double()
            first, second = {
                "mean_std": lambda k: (k.mean(1), k.std(1, unbiased=False)),
                "minmax": lambda k: (k.amax(1), k.amin(1)),
                "halves": lambda k: (k[:, :8].mean(1), k[:, 8:].mean(1)),
            }[kind](keys)
            got = summaries[summary_pages[request, block // 64].long(), :, block % 64]
            tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}[dtype]
            assert relative_error(got[:, 0], first) < tolerance and relative_error(got[:, 1], second) < tolerance
            for h in range(heads):
                for layer in range(2):
                    unit = int(host_units[request, block * host_step + host_offset + layer])
                    assert torch.equal(host[unit, h], was[layer, page, h])
                if slots < 0:
                    continue
                order = [(int(was_steps[request, h, s]), int(was_blocks[request, h, s]), s) for s in range(slots)]
                slot = slots if grows else min(order)[2]
                assert int(slot_blocks[request, h, slot]) == block and int(slot_steps[request, h, slot]) == 77
                assert torch.equal(pool[slot_pages[request, slot].long(), h], before[page, h])
                touched.add((request, h, slot))
        for request in range(requests):
            for h in range(heads):
                for s in range(top_k):
                    if (request, h, s) not in touched:
                        assert slot_blocks[request, h, s] == was_blocks[request, h, s]
                        assert torch.equal(pool[slot_pages[request, s].long(), h], before[slot_pages[request, s].long(), h])
        assert torch.equal(layers[1].cpu(), was[1])
        written = {int(host_units[r, b * host_step + host_offset + layer]) for r, b, *_ in settled for layer in range(2)}
        assert all(bool((host[u] == 7.0).all()) for u in range(units) if u not in written)


@pytest.mark.parametrize("size", [2048, 4096, 8192, 16384, 65536])
def test_gather(size: int) -> None:
    torch.manual_seed(size)
    host = torch.randint(-(2**31), 2**31 - 1, (300, size // 4), dtype=torch.int32).pin_memory()
    few = ((0, 4, 8), (1, 4, 2), (3, 1, 4), (17, 2, 6), (40, 3, 8))
    for count, num_ctas, in_flight in few if SMALL else (*few, (250, 3, 2), (250, 1, 4), (250, 3, 6), (299, 16, 8)):
        device = torch.full_like(host, -1, device="cuda")
        source, target = torch.randperm(300)[:count], torch.randperm(300)[:count]
        copies = [(host.data_ptr() + int(s) * size, device.data_ptr() + int(d) * size) for s, d in zip(source, target, strict=True)] + [
            (0, 0)
        ]  # beyond the count: never looked at
        keep = [torch.tensor(copies, device="cuda"), ints([count])]
        _core.cuda.gather(keep[0].data_ptr(), keep[1].data_ptr(), size, num_ctas, in_flight, stream())
        torch.cuda.synchronize()
        expected = torch.full_like(host, -1)
        expected[target] = host[source]
        assert torch.equal(device.cpu(), expected)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_layers(dtype: str) -> None:
    torch.manual_seed(4)
    t, tolerance = DTYPES[dtype], {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    for rows, dim in ((0, 64), (1, 8), (3, 576)) if SMALL else ((0, 64), (1, 8), (3, 576), (129, 4096), (2, 12288)):
        x, residual, weight = (torch.randn(n, dim, device="cuda").to(t) for n in (rows, rows, 1))
        y, before = torch.full_like(x, NAN), residual.clone()
        for r in (0, residual.data_ptr()):
            _core.cuda.add_rms_norm(dtype, x.data_ptr(), r, weight.data_ptr(), y.data_ptr(), rows, dim, 1e-5, stream())
            torch.cuda.synchronize()
            total = (x + before if r else x).double()
            if rows:
                assert relative_error(y, total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()) < tolerance
            assert torch.equal(residual, x + before if r else before)
        gate_up, z = torch.randn(rows, 2 * dim, device="cuda").to(t), torch.full_like(x, NAN)
        _core.cuda.silu_mul(dtype, gate_up.data_ptr(), z.data_ptr(), rows, dim, stream())
        torch.cuda.synchronize()
        if rows:
            gate, up = gate_up.double().split(dim, dim=1)
            assert relative_error(z, gate * gate.sigmoid() * up) < tolerance


@pytest.mark.cublas
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_linear(dtype: str) -> None:
    torch.manual_seed(5)
    t, tolerance, linear = DTYPES[dtype], {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}[dtype], _core.cuda.Linear()
    for rows, n, k in ((0, 64, 64), (1, 8, 16), (3, 960, 576), (64, 6144, 4096), (257, 520, 1536)):
        x, weight, bias = (
            torch.randn(rows, k, device="cuda").to(t),
            torch.randn(n, k, device="cuda").to(t),
            torch.randn(n, device="cuda").to(t),
        )
        for b, sms in ((None, 0), (bias, 0), (None, 100), (bias, 128)):
            problem = (dtype, rows, n, k, sms, x.data_ptr(), weight.data_ptr(), 0 if b is None else b.data_ptr())
            expected = x.double() @ weight.double().T + (0 if b is None else b.double())
            for tuned in (False, True):
                y = torch.full((rows, n), NAN, dtype=t, device="cuda")
                if tuned and rows:
                    tuned_problem = (*problem[:6], [weight.data_ptr()] * 2, problem[7])
                    assert linear.tune(*tuned_problem, y.data_ptr(), 3, stream()) > 0
                    y.fill_(NAN)
                linear.run(*problem, y.data_ptr(), stream())
                torch.cuda.synchronize()
                if rows:
                    assert relative_error(y, expected) < tolerance


def test_flags_order_streams() -> None:
    """What follows a wait runs after what comes before all the flags are set, though it was launched by another stream."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    flags, step = torch.tensor([4, 9, 4], device="cuda"), torch.tensor([6], device="cuda")
    big, seen = torch.zeros(64 << 20, device="cuda"), torch.zeros(2, device="cuda")
    predictors, number = ints([(request, *[0] * 6) for request in (2, 0)]), ints([2])
    stats = torch.full((4, 4), 100, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        for i in range(20):
            big.fill_(i + 1.0)
        _core.cuda.set_flags(flags.data_ptr(), 1, 0, 5, first.cuda_stream)
        for i in range(20):
            big.fill_(i + 101.0)
        _core.cuda.set_flags(flags[2:].data_ptr(), 1, step.data_ptr(), 0, first.cuda_stream)
    with torch.cuda.stream(second):
        counted = {"predictors": predictors.data_ptr(), "num_predictors": number.data_ptr(), "stats": stats.data_ptr()}
        _core.cuda.wait_flags(flags.data_ptr(), 2, step.data_ptr(), 0, second.cuda_stream, **counted)
        seen[0] = big[-1]
        _core.cuda.wait_flags(flags[1:].data_ptr(), 2, 0, 6, second.cuda_stream)
        seen[1] = big[-1]
    torch.cuda.synchronize()
    assert flags.tolist() == [5, 9, 6]
    assert seen[0] >= 20 and seen[1] == 120
    waited = stats[:, 3].tolist()
    assert waited[1] == waited[3] == 100 and waited[0] == waited[2]
    assert waited[0] > 1000 or SMALL, "20 fills of 256 MiB take longer than a microsecond; but a sanitizer runs kernels one by one"
    assert (stats[:, :3] == 100).all()
    with pytest.raises(ValueError, match=r"wait_flags: count = 33"):
        _core.cuda.wait_flags(flags.data_ptr(), 33, 0, 0, 0)


def test_a_gather_sets_its_flag_when_all_is_there() -> None:
    host = torch.arange(4096 * 1024, dtype=torch.int32).view(4096, 1024).pin_memory()
    flag, arrivals, step, number = torch.tensor([3], device="cuda"), ints([0]), torch.tensor([4], device="cuda"), ints([len(host)])
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(4):
        device, seen = torch.full_like(host, -1, device="cuda"), torch.empty_like(host, device="cuda")
        copies = torch.tensor([(host[i].data_ptr(), device[i].data_ptr()) for i in range(len(host))], device="cuda")
        torch.cuda.synchronize()
        args = (copies.data_ptr(), number.data_ptr(), 4096, 5, 4)
        _core.cuda.gather(*args, first.cuda_stream, flag.data_ptr(), arrivals.data_ptr(), step.data_ptr())
        with torch.cuda.stream(second):
            _core.cuda.wait_flags(flag.data_ptr(), 1, 0, 4 + turn, second.cuda_stream)
            seen.copy_(device)
        torch.cuda.synchronize()
        assert int(flag) == 4 + turn and int(arrivals) == 0
        assert torch.equal(seen.cpu(), host)
        step += 1


def test_shapes_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gather: bytes = 12"):
        _core.cuda.gather(0, 0, 12, 1, 8, 0)
    with pytest.raises(ValueError, match=r"gather: in_flight = 5"):
        _core.cuda.gather(0, 0, 8192, 1, 5, 0)
