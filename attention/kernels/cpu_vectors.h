// Products of small matrices and exponentials, in vectors of the target processor.

#ifndef HEADCOUNT_NATIVE_VECTORS_H_
#define HEADCOUNT_NATIVE_VECTORS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

// W: floats per vector. TALL: rows of a tile, two vectors wide, that fits registers.
#if defined(__AVX512F__)
constexpr int W = 16, TALL = 8;
#elif defined(__AVX__)
constexpr int W = 8, TALL = 6;
#elif defined(__aarch64__)
constexpr int W = 4, TALL = 8;
#else
#error the kernels need AVX or NEON, else blockwise is faster
#endif

// Vector types without alignment requirements.
typedef float Vector __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t FourWords __attribute__((vector_size(16)));
typedef uint16_t BFloat16;  // the upper half of a float
typedef BFloat16 EightHalves __attribute__((vector_size(16)));
typedef uint64_t TwoPairs __attribute__((vector_size(16)));

// Overloads, because a template argument would drop the alignment attribute.
inline Vector& at(float* x) { return *reinterpret_cast<Vector*>(x); }
inline const Vector& at(const float* x) { return *reinterpret_cast<const Vector*>(x); }
inline Four& four(float* x) { return *reinterpret_cast<Four*>(x); }
inline Four four(const float* x) { return *reinterpret_cast<const Four*>(x); }
inline Four four(const BFloat16* x) {
  uint64_t halves;
  std::memcpy(&halves, x, sizeof halves);
  const EightHalves upper = (EightHalves)TwoPairs{halves, 0};
  return (Four)__builtin_shufflevector(EightHalves{}, upper, 0, 8, 0, 9, 0, 10, 0, 11);
}
inline void put(Four x, float* to) { four(to) = x; }
// Round to the nearest bfloat16, ties to even. NaN stays NaN.
inline void put(Four x, BFloat16* to) {
  const FourWords bits = (FourWords)x;
  const FourWords rounded = bits + (0x7FFFu + (bits >> 16 & 1u));
  const EightHalves both = (EightHalves)(x == x ? rounded : bits | 0x400000u);
  const EightHalves upper = __builtin_shufflevector(both, both, 1, 3, 5, 7, 1, 3, 5, 7);
  const uint64_t halves = ((TwoPairs)upper)[0];
  std::memcpy(to, &halves, sizeof halves);
}
// As `four` and `put`, for one element.
inline float one(const float* x) { return *x; }
inline float one(const BFloat16* x) {
  const BFloat16 padded[4] = {*x};
  return four(padded)[0];
}
inline void put(float x, float* to) { *to = x; }
inline void put(float x, BFloat16* to) {
  BFloat16 padded[4];
  put(Four{x}, padded);
  *to = padded[0];
}

inline int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

inline Vector higher(Vector x, Vector y) { return x > y ? x : y; }
inline Vector added(Vector x, Vector y) { return x + y; }

// `chosen` takes element i from y if i has the bit `by`, else from x. `partners` takes
// the element whose index differs from `chosen`'s in that bit only.
template <int by, int... i>
inline Vector chosen(Vector x, Vector y, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(x, y, (i & by ? W + i : i)...);
}
template <int by, int... i>
inline Vector partners(Vector x, Vector y, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(x, y, (i & by ? W + (i ^ by) : i ^ by)...);
}

// Reduce each of W vectors to one element: element r of the result combines all
// elements of x[r], as a tree, two vectors per operation. Overwrites the vectors.
template <int by = W / 2, typename Operation>
inline Vector reduced(Vector* x, Operation combine) {
  constexpr auto all = std::make_integer_sequence<int, W>();
  for (int r = 0; r < by; ++r)
    x[r] = combine(chosen<by>(x[r], x[r + by], all), partners<by>(x[r], x[r + by], all));
  if constexpr (by == 1)
    return x[0];
  else
    return reduced<by / 2>(x, combine);
}

// Clip x to the domain of `exponential`, which is 0 for x <= -88.
inline Vector clipped(Vector x) { return x < -88.f ? Vector{} - 88.f : x; }

// Compute e^x for -88 <= x <= 0, to one unit in the last place; 0 at -88, NaN for NaN.
inline Vector exponential(Vector x) {
  const Vector shifted = x * 1.44269504f + 12582912.f;  // low bits: round(x / ln 2)
  const Vector n = shifted - 12582912.f;
  const Vector rest = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  // 1 + rest + a fitted polynomial: error at most 3e-9 for |rest| <= ln 2 / 2.
  Vector p = rest * 1.38146e-3f + 8.36872e-3f;
  p = p * rest + 4.166839e-2f;
  p = p * rest + 1.6666521e-1f;
  p = p * rest + 4.9999993e-1f;
  p = p * rest + 1.f;
  p = p * rest + 1.f;
  const Vector power = (Vector)(((Bits)shifted + 127) << 23);  // 2^n
  return x <= -88.f ? Vector{} : p * power;
}

// Hashes of a row of weights from key `start` on, as `kept` in attention/dropout.py.
class Dropout {
 public:
  Dropout(int32_t row_key, int64_t start) {
    for (int i = 0; i < W; ++i) first_[i] = static_cast<uint32_t>(start + i) * SPREAD;
    row_key_ = Words{} + static_cast<uint32_t>(row_key);
  }
  // Hash the W keys from start + s on.
  Bits operator()(int64_t s) const {
    Words x = row_key_ ^ (first_ + static_cast<uint32_t>(s) * SPREAD);
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return (Bits)(x >> 8);
  }

 private:
  static constexpr uint32_t SPREAD = 0x9E3779B9u;
  Words first_, row_key_;
};

// Left operand of a product: element (i, j) is at i * row + j * column.
struct Left {
  const float* data;
  int64_t row, column;
};

// Compute C = A B, or C += A B if `add`. A has M rows, B has `depth` rows, and rows of
// B and C have `wide` vectors.
template <int M, int wide>
inline void tile(int64_t depth, Left a, const float* b, int64_t b_row, float* c,
                 int64_t c_row, bool add) {
  Vector sums[M][wide];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int w = 0; w < wide; ++w)
      sums[m][w] = add ? at(c + m * c_row + w * W) : Vector{};
  for (int64_t k = 0; k < depth; ++k) {
    Vector right[wide];
#pragma GCC unroll 16
    for (int w = 0; w < wide; ++w) right[w] = at(b + k * b_row + w * W);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
      for (int w = 0; w < wide; ++w)
        sums[m][w] += a.data[m * a.row + k * a.column] * right[w];
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int w = 0; w < wide; ++w) at(c + m * c_row + w * W) = sums[m][w];
}

// As `tile`, for M <= TALL rows, known only at run time, and one or two vectors.
template <int TALLEST = TALL>
inline void strip(int64_t M, bool two, int64_t depth, Left a, const float* b,
                  int64_t b_row, float* c, int64_t c_row, bool add) {
  if (M < TALLEST) {
    if constexpr (TALLEST > 1)
      strip<TALLEST - 1>(M, two, depth, a, b, b_row, c, c_row, add);
  } else if (two) {
    tile<TALLEST, 2>(depth, a, b, b_row, c, c_row, add);
  } else {
    tile<TALLEST, 1>(depth, a, b, b_row, c, c_row, add);
  }
}

// As `tile`, for any M and any multiple N of W columns.
inline void multiply(int64_t M, int64_t N, int64_t depth, Left a, const float* b,
                     int64_t b_row, float* c, int64_t c_row, bool add) {
  for (int64_t n = 0; n < N; n += 2 * W)
    for (int64_t m = 0; m < M; m += TALL) {
      const Left rows{a.data + m * a.row, a.row, a.column};
      strip(std::min<int64_t>(TALL, M - m), N - n > W, depth, rows, b + n, b_row,
            c + m * c_row + n, c_row, add);
    }
}

template <typename From, typename To>
inline void scale_to(int64_t width, const From* from, float factor, To* to) {
  int64_t j = 0;
  for (; j + 4 <= width; j += 4) put(four(from + j) * factor, to + j);
  for (; j < width; ++j) put(one(from + j) * factor, to + j);
}

// Copy rows that are `stride` apart to rows of `width_to`, padded with zeros.
template <typename From>
inline void copy(int64_t rows, int64_t width, const From* from, int64_t stride,
                 float* to, int64_t width_to, float factor = 1) {
  for (int64_t i = 0; i < rows; ++i, from += stride, to += width_to) {
    scale_to(width, from, factor, to);
    for (int64_t j = width; j < width_to; ++j) to[j] = 0;
  }
}

// As `copy`, transposed: to `width` rows of `width_to`, padded with zeros if `fill`.
template <typename From, typename To>
inline void transpose(int64_t rows, int64_t width, const From* from, int64_t stride,
                      To* to, int64_t width_to, bool fill = true) {
  auto move = [&](int64_t i, int64_t j) {
    put(one(from + i * stride + j), to + j * width_to + i);
  };
  const int64_t low = rows / 4 * 4, left = width / 4 * 4;
  for (int64_t i = 0; i < low; i += 4) {
    for (int64_t j = 0; j < left; j += 4) {
      const From* x = from + i * stride + j;
      const Four a = four(x), b = four(x + stride);
      const Four c = four(x + 2 * stride), d = four(x + 3 * stride);
      const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      const Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Four ab_right = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const Four cd_right = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      To* y = to + j * width_to + i;
      put(__builtin_shufflevector(ab, cd, 0, 1, 4, 5), y);
      put(__builtin_shufflevector(ab, cd, 2, 3, 6, 7), y + width_to);
      y += 2 * width_to;
      put(__builtin_shufflevector(ab_right, cd_right, 0, 1, 4, 5), y);
      put(__builtin_shufflevector(ab_right, cd_right, 2, 3, 6, 7), y + width_to);
    }
    for (int64_t j = left; j < width; ++j)
      for (int64_t e = i; e < i + 4; ++e) move(e, j);
  }
  for (int64_t i = low; i < rows; ++i)
    for (int64_t j = 0; j < width; ++j) move(i, j);
  for (int64_t j = 0; fill && j < width; ++j)
    std::fill(to + j * width_to + rows, to + (j + 1) * width_to, To{});
}

#endif  // HEADCOUNT_NATIVE_VECTORS_H_
