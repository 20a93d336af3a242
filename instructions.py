"""What the CPU kernels do that Python has no word for, in the processor's vector instructions: written in LLVM's terms,
for numba to compile into them. engine_cpu.py has a plain body beside each name, which says what is meant.
"""

import contextlib
import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


def processor_name() -> str:
    """The processor as its maker names it; what `platform` knows where /proc is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def processor_features() -> frozenset[str]:
    """Names of what the processor can do, as LLVM calls them.

    Where numba is told to compile for another processor, what it is told: of NUMBA_CPU_NAME=haswell
    NUMBA_CPU_FEATURES=+avx2,+fma,+f16c these three. So a machine runs the kernels of lesser ones.
    """
    import llvmlite.binding
    import numba

    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return frozenset(name[1:] for name in (numba.config.CPU_FEATURES or "").split(",") if name.startswith("+"))
    return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)


class Flavour(NamedTuple):
    """How two dtypes are multiplied."""

    step: int            # numbers at a time
    total: Any           # LLVM's type of a sum
    ready: Callable      # (builder, weights) -> as they are multiplied
    dot: Callable        # (builder, totals, activations, weights) -> totals


class Instructions:
    """What the stubs' bodies above say, in LLVM's terms for the processor at hand.

    A tile holds its sums in vector registers: ROWS rows times OUTS outputs, `lanes` float32 each. 32 registers of 16
    lanes (AVX-512) hold 4 times 4 and what is multiplied; 16 of 8 (AVX2, or as good as that) hold 4 times 2.
    """

    def __init__(self):
        import llvmlite.binding
        from llvmlite import ir
        from numba import types

        llvmlite.binding.initialize_native_asmparser()
        self.ir = ir
        self.types = types
        wide = "avx512f" in processor_features()
        self.lanes, self.rows, self.outs = (16, 4, 4) if wide else (8, 4, 2)
        self.outer_rows = 6
        self.i8, self.i16, self.i32, self.i64 = map(ir.IntType, (8, 16, 32, 64))
        self.f32 = ir.FloatType()
        self.lane_halves = self._lane_halves()

    def bound(self) -> dict[str, Any]:
        """The stubs' names -> numba intrinsics, and the shape of a tile."""
        from numba.extending import intrinsic

        types = self.types

        @intrinsic
        def widen(typing_context, number):
            return types.float32(number), self._widen

        @intrinsic
        def as_stored(typing_context, number, array):
            return array.dtype(number, array), self._as_stored

        @intrinsic
        def as_float(typing_context, bits):
            return types.float32(bits), lambda context, builder, signature, args: builder.bitcast(args[0], self.f32)

        @intrinsic
        def fetch(typing_context, array, head, slot, d):
            return types.void(array, head, slot, d), self._fetch

        @intrinsic(prefer_literal=True)
        def tile(typing_context, rows, outs, x, row, weight, o, start, length, sums, at, column, add, ahead, fetch):
            return types.void(rows, outs, x, row, weight, o, start, length, sums, at, column, add, ahead,
                              fetch), self._tile

        @intrinsic(prefer_literal=True)
        def outer(typing_context, rows, x, row, panel, column, steps, out, at, add):
            return types.void(rows, x, row, panel, column, steps, out, at, add), self._outer

        @intrinsic
        def square(typing_context, weight, o, last, k, panel, step, column):
            return types.void(weight, o, last, k, panel, step, column), self._square

        return {"_widen": widen, "_as": as_stored, "_as_float": as_float, "_fetch": fetch, "_tile": tile,
                "_outer": outer, "_square": square, "ROWS": self.rows, "OUTS": self.outs,
                "OUTER_ROWS": self.outer_rows, "COLUMNS": self.outs * self.lanes, "LANES": self.lanes}

    # --- vectors

    def _vector(self, kind, count=None):
        return self.ir.VectorType(kind, count or self.lanes)

    def _shaped(self, kind, like):
        """kind, or a vector of it where `like` is one."""
        return self._vector(kind, like.count) if isinstance(like, self.ir.VectorType) else kind

    def _constant(self, kind, value):
        return self.ir.Constant(kind, [value] * kind.count if isinstance(kind, self.ir.VectorType) else value)

    # --- numbers: see _widen and _as

    def _widened(self, builder, bits, kind):
        types, as_float = self.types, self._shaped(self.f32, bits.type)
        if kind == types.float32:
            return bits
        if kind == types.int8:
            return builder.sitofp(bits, as_float)
        if kind == types.int16:
            return builder.fpext(builder.bitcast(bits, self._shaped(self.ir.HalfType(), bits.type)), as_float)
        as_int = self._shaped(self.i32, bits.type)
        return builder.bitcast(builder.shl(builder.zext(bits, as_int), self._constant(as_int, 16)), as_float)

    def _widen(self, context, builder, signature, args):
        return self._widened(builder, args[0], signature.args[0])

    def _as_stored(self, context, builder, signature, args):
        number, kind = args[0], signature.args[1].dtype
        if kind == self.types.float32:
            return number
        if kind == self.types.int16:
            return builder.bitcast(builder.fptrunc(number, self.ir.HalfType()), self.i16)
        bits = builder.bitcast(number, self.i32)
        sixteen, one, half = self.i32(16), self.i32(1), self.i32(0x7fff)
        odd = builder.and_(builder.lshr(bits, sixteen), one)         # half of the last bit kept; a tie becomes even
        nearest = builder.lshr(builder.add(builder.add(bits, half), odd), sixteen)
        is_nan = builder.fcmp_unordered("uno", number, number)
        return builder.trunc(builder.select(is_nan, self.i32(0x7fc0), nearest), self.i16)

    # --- memory

    def _address(self, context, builder, kind, array, index):
        """The address of an element of a numba array."""
        from numba.core import cgutils

        array = context.make_array(kind)(context, builder, array)
        return cgutils.get_item_pointer(context, builder, kind, array, index)

    def _row_addresses(self, context, builder, kind, array, row, column, count):
        return [self._address(context, builder, kind, array, [builder.add(row, self.i64(n)), column])
                for n in range(count)]

    def _integers(self, context, builder, signature, args, places):
        """The arguments at these places as 64-bit integers."""
        return [context.cast(builder, args[n], signature.args[n], self.types.intp) for n in places]

    def _prefetch(self, builder, address):
        kind = self.ir.FunctionType(self.ir.VoidType(), [address.type, self.i32, self.i32, self.i32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        builder.call(prefetch, [address, self.i32(0), self.i32(3), self.i32(1)])       # to read, into all caches, data

    def _fetch(self, context, builder, signature, args):
        index = self._integers(context, builder, signature, args, range(1, 4))
        address = self._address(context, builder, signature.args[0], args[0], index)
        self._prefetch(builder, builder.bitcast(address, self.i8.as_pointer()))
        return context.get_dummy_value()

    def _load(self, builder, address, count):
        """`count` numbers of what address points to."""
        value = builder.load(builder.bitcast(address, self._vector(address.type.pointee, count).as_pointer()))
        value.align = 1
        return value

    def _load_part(self, builder, address, count, part):
        """The first `part` of them, and zeros: what lies behind may belong to somebody else."""
        from numba.core import cgutils

        kind = self._vector(address.type.pointee, count)
        lane = self.ir.Constant(self._vector(self.i16, count), list(range(count)))
        last = builder.insert_element(lane, builder.trunc(part, self.i16), self.i32(0))
        first = self._constant(self._vector(self.i32, count), 0)
        mask = builder.icmp_unsigned("<", lane, builder.shuffle_vector(last, last, first))
        element = {self.f32: "f32", self.i16: "i16", self.i8: "i8"}[address.type.pointee]
        load = cgutils.get_or_insert_function(
            builder.module, self.ir.FunctionType(kind, [kind.as_pointer(), self.i32, mask.type, kind]),
            f"llvm.masked.load.v{count}{element}.p0")
        return builder.call(load, [builder.bitcast(address, kind.as_pointer()), self.i32(1), mask,
                                   self.ir.Constant(kind, None)])

    # --- products and sums

    def _flavour(self, x, weight) -> Flavour:
        """By numba's types of activations and weights."""
        types, lanes = self.types, self.lanes
        if (x, weight) == (types.uint16, types.uint16):
            return Flavour(2 * lanes, self.f32, lambda builder, w: w, self._assembly("vdpbf16ps"))
        if x == types.int16:                                         # beside int8, or what a panel made of it
            pairs = self._vector(self.i16, 2 * lanes)
            wide = (lambda builder, w: builder.sext(w, pairs)) if weight == types.int8 else (lambda builder, w: w)
            return Flavour(2 * lanes, self.i32, wide, self._whole_dot())
        return Flavour(lanes, self.f32, lambda builder, w: self._widened(builder, w, weight), self._fused)

    def _whole_dot(self):
        """How pairs of whole numbers of 16 bits are multiplied and added: in one instruction, or in two."""
        features = processor_features()
        if self.lanes == 16 and "avx512vnni" in features:
            return self._assembly("vpdpwssd")
        if self.lanes == 8 and "avxvnni" in features:
            return self._assembly("{vex} vpdpwssd")
        name = "llvm.x86.avx512.pmaddw.d.512" if self.lanes == 16 else "llvm.x86.avx2.pmadd.wd"

        def dot(builder, total, x, w):
            from numba.core import cgutils

            pairs = self._vector(self.i16, 2 * self.lanes)
            kind = self.ir.FunctionType(total.type, [pairs, pairs])
            products = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.add(total, builder.call(products, [builder.bitcast(x, pairs), builder.bitcast(w, pairs)]))
        return dot

    def _assembly(self, instruction):
        """An instruction that adds the products of pairs of 16 bits to a total of 32."""
        pairs = self._vector(self.i32)
        registers = "=x,0,x,x" if "{vex}" in instruction else "=v,0,v,v"                # the first 16, or all 32

        def dot(builder, total, x, w):
            kind = self.ir.FunctionType(total.type, [total.type, pairs, pairs])
            code = self.ir.InlineAsm(kind, instruction + " $3, $2, $0", registers)
            return builder.call(code, [total, builder.bitcast(x, pairs), builder.bitcast(w, pairs)])
        return dot

    def _fused(self, builder, total, x, w):
        """total + x * w, rounded once."""
        return builder.fadd(total, builder.fmul(x, w, flags=("contract",)), flags=("contract",))

    def _lane_halves(self):
        """Which of two vectors' lanes are added to which others, step by step: neighbours, first in groups of four,
        which processors shuffle fastest, then whole groups."""
        lanes = self.lanes
        in_fours = [[at + 4 * group + n for group in range(lanes // 4) for at in (0, lanes) for n in (odd, odd + 2)]
                    for odd in (0, 1)]
        of_fours = [[4 * group + n for group in range(odd, lanes // 2, 2) for n in range(4)] for odd in (0, 1)]
        steps = [in_fours] * 2 + [of_fours] * (lanes // 4).bit_length()
        return [[self.ir.Constant(self._vector(self.i32), half) for half in step]
                for step in steps[:lanes.bit_length() - 1]]

    def _summed(self, builder, totals):
        """The sums of the lanes of each vector, in the lanes of one."""
        add = builder.add if totals[0].type.element == self.i32 else builder.fadd
        for first, second in self.lane_halves:
            pairs = list(zip(totals[::2], totals[1::2])) or [(totals[0], totals[0])]
            totals = [add(builder.shuffle_vector(*pair, first), builder.shuffle_vector(*pair, second))
                      for pair in pairs]
        whole = totals[0].type.element == self.i32
        return builder.sitofp(totals[0], self._vector(self.f32)) if whole else totals[0]

    # --- the two loops

    def _tile(self, context, builder, signature, args):
        """See the function `_tile`: a loop over whole vectors, what is left of the row, and the sums."""
        from numba.core import cgutils

        kinds = signature.args
        n_rows, n_outs = (kind.literal_value for kind in kinds[:2])
        row, o, start, length, at, column, ahead, fetch = self._integers(
            context, builder, signature, args, (3, 5, 6, 7, 9, 10, 12, 13))
        flavour = self._flavour(kinds[2].dtype, kinds[4].dtype)
        xs = self._row_addresses(context, builder, kinds[2], args[2], row, start, n_rows)
        weights = self._row_addresses(context, builder, kinds[4], args[4], o, start, n_outs)
        places = self._row_addresses(context, builder, kinds[8], args[8], at, column, n_rows)
        size = context.get_abi_sizeof(context.get_data_type(kinds[4].dtype))
        zero = self.ir.Constant(self._vector(flavour.total), None)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(n_rows * n_outs)]

        whole = builder.udiv(length, self.i64(flavour.step))
        with cgutils.for_range(builder, whole) as loop:
            index = builder.mul(loop.index, self.i64(flavour.step))
            self._fetch_ahead(builder, weights[0], ahead, index, fetch, flavour.step, size)
            self._add_up(builder, flavour, xs, weights, totals, index)
        index = builder.mul(whole, self.i64(flavour.step))
        rest = builder.sub(length, index)
        with builder.if_then(builder.icmp_signed(">", rest, self.i64(0)), likely=False):
            self._add_up(builder, flavour, xs, weights, totals, index, rest)
        found = self._summed(builder, [builder.load(place) for place in totals])
        for r, place in enumerate(places):
            self._keep(builder, found, range(r * n_outs, (r + 1) * n_outs), place, args[11])
        return context.get_dummy_value()

    def _fetch_ahead(self, builder, address, ahead, index, fetch, step, size):
        """Ask for `fetch` vectors of weights, `ahead` bytes behind these; one after another, as memory likes it."""
        from numba.core import cgutils

        first = builder.bitcast(address, self.i8.as_pointer())
        line = builder.add(ahead, builder.mul(builder.mul(index, fetch), self.i64(size)))
        with cgutils.for_range(builder, fetch) as nth:
            further = builder.mul(nth.index, self.i64(step * size))
            self._prefetch(builder, builder.gep(first, [builder.add(line, further)]))

    def _add_up(self, builder, flavour, xs, weights, totals, index, part=None):
        """Add the products at `index` and on, a vector of them or the first `part`, to all totals."""
        def load(address):
            address = builder.gep(address, [index])
            if part is None:
                return self._load(builder, address, flavour.step)
            return self._load_part(builder, address, flavour.step, part)

        ws = [flavour.ready(builder, load(address)) for address in weights]
        for r, address in enumerate(xs):
            values = load(address)
            for w, place in zip(ws, totals[r * len(ws):]):
                builder.store(flavour.dot(builder, builder.load(place), values, w), place)

    def _keep(self, builder, found, lanes, place, add):
        """Store some lanes at `place`, or add them to what is there."""
        mask = self.ir.Constant(self._vector(self.i32, len(lanes)), list(lanes))
        own = builder.shuffle_vector(found, found, mask)
        before = self._load(builder, place, len(lanes))
        own = builder.fadd(own, builder.select(add, before, self.ir.Constant(before.type, None)))
        builder.store(own, builder.bitcast(place, own.type.as_pointer())).align = 4

    def _outer(self, context, builder, signature, args):
        """See the function `_outer`: each step of x is spread over a vector and multiplied by COLUMNS of the panel."""
        from numba.core import cgutils

        kinds = signature.args
        row, column, steps, at = self._integers(context, builder, signature, args, (2, 4, 5, 7))
        flavour = self._flavour(kinds[1].dtype, kinds[3].dtype)
        per = self.i64(flavour.step // self.lanes)
        columns = [builder.add(column, self.i64(n * self.lanes)) for n in range(self.outs)]
        rows = [self.i64(r) for r in range(kinds[0].literal_value)]
        zero = self.ir.Constant(self._vector(flavour.total), None)
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in columns] for _ in rows]
        with cgutils.for_range(builder, steps) as loop:
            ws = [self._load(builder, self._address(context, builder, kinds[3], args[3],
                                                    [loop.index, builder.mul(c, per)]), flavour.step) for c in columns]
            for r, own in zip(rows, totals):
                address = self._address(context, builder, kinds[1], args[1],
                                        [builder.add(row, r), builder.mul(loop.index, per)])
                spread = self._spread(builder, builder.bitcast(address, flavour.total.as_pointer()))
                for w, total in zip(ws, own):
                    builder.store(flavour.dot(builder, builder.load(total), spread, w), total)
        for r, own in zip(rows, totals):
            for c, total in zip(columns, own):
                place = self._address(context, builder, kinds[6], args[6], [builder.add(at, r), c])
                value = builder.load(total)
                if flavour.total == self.i32:
                    value = builder.sitofp(value, self._vector(self.f32))
                before = self._load(builder, place, self.lanes)
                value = builder.fadd(value, builder.select(args[8], before, self.ir.Constant(before.type, None)))
                builder.store(value, builder.bitcast(place, value.type.as_pointer())).align = 4
        return context.get_dummy_value()

    def _spread(self, builder, address):
        """The 32 bits there, in all lanes."""
        number = builder.load(address)
        number.align = 2
        kind = self._vector(address.type.pointee)
        lane = builder.insert_element(self.ir.Constant(kind, self.ir.Undefined), number, self.i32(0))
        return builder.shuffle_vector(lane, lane, self._constant(self._vector(self.i32), 0))

    def _square(self, context, builder, signature, args):
        """See the function `_square`: LANES vectors, one of each output, are transposed and stored."""
        from numba.core import cgutils

        kinds = signature.args
        o, last, k, step, column = self._integers(context, builder, signature, args, (1, 2, 3, 5, 6))
        weight, panel = kinds[0].dtype, kinds[4].dtype
        per = 1 if panel == self.types.float32 else 2
        count = per * self.lanes
        shape = context.make_array(kinds[0])(context, builder, args[0]).shape
        K = cgutils.unpack_tuple(builder, shape)[1]
        rest = builder.sub(K, k)
        addresses = []
        for n in range(self.lanes):
            output = builder.add(o, self.i64(n))
            output = builder.select(builder.icmp_signed("<", output, last), output, last)
            addresses.append(self._address(context, builder, kinds[0], args[0], [output, k]))
        rows = [cgutils.alloca_once(builder, self._vector(addresses[0].type.pointee, count)) for _ in addresses]
        with builder.if_else(builder.icmp_signed(">=", rest, self.i64(count))) as (whole, part):
            with whole:
                for address, vector in zip(addresses, rows):
                    builder.store(self._load(builder, address, count), vector)
            with part:
                for address, vector in zip(addresses, rows):
                    builder.store(self._load_part(builder, address, count, rest), vector)
        rows = [self._as_panel(builder, builder.load(vector), weight, panel) for vector in rows]
        for n, vector in enumerate(self._transposed(builder, rows)):
            place = self._address(context, builder, kinds[4], args[4],
                                  [builder.add(step, self.i64(n)), builder.mul(column, self.i64(per))])
            builder.store(vector, builder.bitcast(place, vector.type.as_pointer())).align = 4
        return context.get_dummy_value()

    def _as_panel(self, builder, numbers, weight, panel):
        """Weights as a panel holds them, in vectors of 32 bits."""
        if panel == self.types.float32:
            return self._widened(builder, numbers, weight)
        if weight == self.types.int8:
            numbers = builder.sext(numbers, self._vector(self.i16, numbers.type.count))
        return builder.bitcast(numbers, self._vector(self.i32))

    def _transposed(self, builder, rows):
        """The columns of a square of vectors: halves change places, then halves of halves."""
        size = self.lanes // 2
        while size:
            own = [lane if not lane & size else self.lanes + lane - size for lane in range(self.lanes)]
            other = [lane + size if not lane & size else self.lanes + lane for lane in range(self.lanes)]
            masks = [self.ir.Constant(self._vector(self.i32), mask) for mask in (own, other)]
            for n in range(self.lanes):
                if not n & size:
                    a, b = rows[n], rows[n + size]
                    rows[n], rows[n + size] = (builder.shuffle_vector(a, b, mask) for mask in masks)
            size //= 2
        return rows
