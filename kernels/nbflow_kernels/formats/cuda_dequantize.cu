// Row gather with dequantization of the storage bytes of a format.
//
// The macros of `cuda_dequantize.py` (_defines) hold the format's field table and its decode formula,
// weight = d * FACTOR * scale * value(code) + base (`codec_spec.py`), which rounds once, as on the CPU.
// Compiled without contraction (-fmad=false): only `fmaf` is fused.
#include "cuda/float16.cuh"
#include "cuda/types.cuh"

enum { D_F16, D_E8M0, D_E4M3, D_U8, D_F32 };                     // D_TYPE
enum { NO_BASE, BASE_OF_BLOCK, BASE_OF_SUB_BLOCK, ZERO_POINT, FLOAT32_BASE };  // BASE
enum { FROM_FIELD, ON_GRID, BASE_3, TRELLIS };                                 // CODES

// `Plane` of codec_spec.py; `end` is 0 if the plane has bits of all numbers.
struct Plane {
  u32 at = 0, bits = 0, shift = 0, stride = 1, bit = 0, per_group = 1, first = 0, end = 0;
  u32 step = 0, pitch = 0, word_bytes = 1;
};

// `Field` of codec_spec.py; without planes, the format lacks it.
struct Field {
  int n_planes = 0;
  u32 flip = 0, radix = 0;
  int factor = 0, offset = 0;
  Plane planes[4] = {};
};

struct Code { static constexpr Field FIELD = CODE_FIELD; };
struct Sign { static constexpr Field FIELD = SIGN_FIELD; };
struct Scale { static constexpr Field FIELD = SCALE_FIELD; };
struct Min { static constexpr Field FIELD = MIN_FIELD; };
struct D { static constexpr Field FIELD = D_FIELD; };
struct M { static constexpr Field FIELD = M_FIELD; };

// ---- numbers -------------------------------------------------------------------------------------

// Index `base + j`, base a multiple of ALIGN and j < ALIGN, both powers of two.  Quotients and remainders
// keep the parts apart, so that constants j of unrolled loops share what depends on `base`, loads too.
template <u32 ALIGN>
struct Index {
  u32 base, j;

  template <u32 N>
  DEV u32 quotient() const { return N <= ALIGN ? base / N + j / N : base / N; }
  template <u32 N>
  DEV u32 remainder() const { return N <= ALIGN ? j % N : base % N + j; }
  template <u32 N>
  DEV Index<(ALIGN > N ? ALIGN / N : 1)> divided() const { return {base / N, ALIGN > N ? j / N : 0}; }
};

// The bits of stored number `i` in plane P, at their position in the number.
template <class F, int P, u32 ALIGN>
DEV u32 plane_bits(const u8* block, Index<ALIGN> i) {
  constexpr Plane p = F::FIELD.planes[P];
  static_assert(p.first % ALIGN == 0, "threads have the weights of whole planes");
  if constexpr (p.end > 0) {
    if (i.base + i.j < p.first || i.base + i.j >= p.end) return 0;
    i.base -= p.first;
  }
  const u8* at = block + p.at + i.template quotient<p.stride * p.per_group>() * p.step +
                 i.template remainder<p.stride>();
  u32 word = at[0];
  if constexpr (p.word_bytes > 1) word |= (u32)at[1] << 8;
  if constexpr (p.word_bytes > 2) word |= (u32)at[2] << 16 | (u32)at[3] << 24;
  const u32 place = i.template divided<p.stride>().template remainder<p.per_group>();
  return (word >> (p.bit + p.pitch * place) & ((1u << p.bits) - 1)) << p.shift;
}

// Number `i` of a field.
template <class F, u32 ALIGN>
DEV int number_at(const u8* block, Index<ALIGN> i) {
  constexpr Field f = F::FIELD;
  const auto stored = i.template divided<f.radix ? 2 : 1>();
  u32 v = plane_bits<F, 0>(block, stored);
  if constexpr (f.n_planes > 1) v |= plane_bits<F, 1>(block, stored);
  if constexpr (f.n_planes > 2) v |= plane_bits<F, 2>(block, stored);
  if constexpr (f.n_planes > 3) v |= plane_bits<F, 3>(block, stored);
  v ^= f.flip;
  if constexpr (f.radix > 0) {
    const u32 y = v / f.radix;
    v = i.template remainder<2>() ? y : v - f.radix * y;
  }
  return f.factor * (int)v + f.offset;
}

// Stored bits of `d` or `m` as a float; `hundredths` for the base of D_U8.
DEV float float_of(u32 bits, bool hundredths) {
  switch (D_TYPE) {
    case D_E8M0:  // 2**(bits - 128); the first two are subnormal
      return __uint_as_float(bits < 2 ? 0x200000u << bits : (bits - 1) << 23);
    case D_E4M3: {  // half of the unsigned number
      const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
      if ((bits & 127) == 127) return 0.0f;
      if (exponent == 0) return mantissa * 0.0009765625f;
      return (8 + mantissa) * __uint_as_float((exponent + 116) << 23);
    }
    case D_U8:
      return hundredths ? __fdiv_rn((float)bits, 100.0f) - 1.0f : __fdiv_rn((float)bits, 1000.0f);
    case D_F32:
      return __uint_as_float(bits);
    default:
      return Element<F16>::of((u16)bits);
  }
}

// Bits of float32 `i` of a field: two numbers, the lower half first.
template <class F>
DEV u32 two_halves(const u8* block, u32 i) {
  const u32 low = number_at<F>(block, Index<1>{2 * i, 0});
  return low | (u32)number_at<F>(block, Index<1>{2 * i + 1, 0}) << 16;
}

// Bits of `d` of block i of D_BLOCK weights.
DEV u32 bits_of_d(const u8* block, u32 i) {
  if constexpr (D_TYPE == D_F32) return two_halves<D>(block, i);
  return number_at<D>(block, Index<1>{i, 0});
}

// ---- weights -------------------------------------------------------------------------------------

// The 12 bits of a stream that end with the TRELLIS_BITS bits of number `n`; bits before it are 0.
DEV u32 state_at(const u8* stream, int n) {
  const int end = TRELLIS_BITS * (n + 1), last = (end - 1) >> 3;
  u32 word = (u32)stream[last] << 16;
  if (last > 0) word |= (u32)stream[last - 1] << 8;
  if (last > 1) word |= stream[last - 2];
  return word >> (end - 8 * last + 4) & 4095;
}

// Code `i` of a block: from its field; a point's coordinate with the sign above; a digit in base 3; or,
// for a trellis, the entry of the state in `grid`.
template <int KIND>
DEV u32 code_at(const u8* block, Index<PIECE> i, const u16* grid) {
  if constexpr (KIND == ON_GRID) {
    constexpr u32 WIDTH = PER_POINT == 8 ? 2 : 3;
    u32 sign = number_at<Sign>(block, i.divided<PER_SIGN>());
    if constexpr (SIGN_BITS == 7) sign |= (__popc(sign) & 1) << 7;  // the parity is even
    if constexpr (SIGN_BITS > 1) sign = sign >> i.remainder<8>() & 1;
    const u32 point = grid[number_at<Code>(block, i.divided<PER_POINT>())];
    return (point >> WIDTH * i.remainder<PER_POINT>() & ((1u << WIDTH) - 1)) | sign << WIDTH;
  } else if constexpr (KIND == BASE_3) {
    const u32 n = i.base + i.j;
    const u32 at = n < 160 ? n % 32 : n < 240 ? 32 + n % 16 : 48 + n % 4;
    const u32 digit = n < 160 ? n / 32 : n < 240 ? (n - 160) / 16 : (n - 240) / 4;
    const u32 power = (u32)(0x511b090301ull >> 8 * digit) & 255;  // 3**digit
    return (block[at] * power & 255) * 3 >> 8;
  } else if constexpr (KIND == TRELLIS) {
    return grid[state_at(block + CODE_FIELD_AT, i.base + i.j)];
  } else {
    return number_at<Code>(block, i);
  }
}

// Scale and base of the sub-block of weight `i`.
DEV void scale_and_base(const u8* block, u32 i, float& scale, float& base) {
  const Index<1> of_block{i / D_BLOCK, 0}, of_sub_block{i / SUB_BLOCK, 0};
  scale = float_of(bits_of_d(block, i / D_BLOCK), false) * FACTOR;
  base = 0.0f;
  if constexpr (Scale::FIELD.n_planes > 0) scale *= (float)number_at<Scale>(block, of_sub_block);
  if constexpr (BASE == ZERO_POINT) base = -(scale * (float)number_at<Min>(block, of_block));
  if constexpr (BASE == FLOAT32_BASE) base = __uint_as_float(two_halves<M>(block, i / D_BLOCK));
  if constexpr (BASE == BASE_OF_BLOCK || BASE == BASE_OF_SUB_BLOCK)
    base = float_of(number_at<M>(block, of_block), true);
  if constexpr (BASE == BASE_OF_SUB_BLOCK) base = -(base * (float)number_at<Min>(block, of_sub_block));
}

DEV void store(float* to, float x) { *to = x; }
DEV void store(u16* to, float x) { *to = to_f16(x); }

// out[t] = row ids[t] (t if ids is null) * factor, PIECE weights per thread, which share a scale.  An
// index out of range gives NaN.  `wide`: rows of out begin at multiples of 16 bytes.
template <class T>
__global__ void __launch_bounds__(128) decode_rows(
    const u8* __restrict__ data, const int* ids, const u16* __restrict__ grid,
    const float* __restrict__ values, T* out, int n_rows, int n_out, int columns,
    long long row_bytes, float factor, int wide) {
  const u32 piece = blockIdx.x * 128 + threadIdx.x, first = piece * PIECE;
  if (first >= columns) return;
  const u32 inside = first % BLOCK;
  const u32 n = min(PIECE, columns - (int)first);
  for (int t = blockIdx.y; t < n_out; t += gridDim.y) {
    const long long row = ids != nullptr ? ids[t] : t;
    float w[PIECE];
    if (0 <= row && row < n_rows) {
      const u8* block = data + row * row_bytes + (long long)(first / BLOCK) * BLOCK_BYTES;
      float scale, base;
      scale_and_base(block, inside, scale, base);
#pragma unroll
      for (int j = 0; j < PIECE; j++) {
        const u32 code = code_at<CODES>(block, Index<PIECE>{inside, (u32)j}, grid);
        const float value = HAS_VALUES ? values[code] : (float)((int)code - ZERO);
        w[j] = (BASE != NO_BASE ? fmaf(scale, value, base) : scale * value) * factor;
      }
    } else {
#pragma unroll
      for (int j = 0; j < PIECE; j++) w[j] = nan32();
    }
    T* to = out + (long long)t * columns + first;
    if (sizeof(T) == 4 && PIECE % 4 == 0 && wide && n == PIECE) {
#pragma unroll
      for (int j = 0; j + 3 < PIECE; j += 4)
        *(float4*)(to + j) = make_float4(w[j], w[j + 1], w[j + 2], w[j + 3]);
    } else {
#pragma unroll
      for (int j = 0; j < PIECE; j++)
        if (j < n) store(to + j, w[j]);
    }
  }
}
