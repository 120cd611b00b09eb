// Kernels of `attention.kernels.cpu`: fused attention on CPUs, forward and backward.
//
// Online softmax over blocks of the T x S map (after Dao 2023, arXiv:2307.08691). Only
// the range of columns that some query of a block may attend to is computed. A task is
// some queries of one head, or in the backward pass a whole head. Tasks write to
// separate results and add in a fixed order, so results are bit-identical for any
// number of threads.

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>

#include "cpu_problem.h"
#include "cpu_vectors.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
template <typename Element>
using Array = ffi::Buffer<std::is_same_v<Element, float> ? ffi::F32 : ffi::BF16>;
using Floats = Array<float>;
using Integers = ffi::Buffer<ffi::S32>;
using Booleans = ffi::Buffer<ffi::PRED>;

template <typename Element>
struct Forward : Problem {
  static constexpr int SUMS = 5;  // energy, distance, previous, current, following
  static constexpr int SUMMARY = SUMS + 3;
  const Element *query, *key, *value;
  Element* out;
  float *maximum, *reciprocal;
  float* statistics;  // `B N parts SUMMARY` or none: see `summarize`

  int64_t parts() const { return (T + QUERIES - 1) / QUERIES; }
  int64_t tasks() const { return batch * N * parts(); }

  void run(int64_t task) const {
    const int64_t b = task / parts() / N, n = task / parts() % N;
    const int64_t first = task % parts() * QUERIES;
    const int64_t count = std::min(QUERIES, T - first);
    const int64_t wide = padded(V), block = padded(std::min(KEYS, S)) + W;
    const int64_t rows_kept = count + W;  // `softmax` takes W at a time
    Scratch scratch(8, count * (H + wide) + rows_kept * (2 + SUMS) +
                           block * (H + wide + ROWS));
    float* q = scratch.take(count * H);
    float* outs = scratch.take(count * wide);
    float* highest = scratch.take(rows_kept);
    float* total = scratch.take(rows_kept);
    float* sums = scratch.take(rows_kept * SUMS);
    float* k = scratch.take(H * block);
    float* v = scratch.take(block * wide);
    float* logits = scratch.take(ROWS * block);
    copy(count, H, query + row(b, first, n) * H, N * H, q, H, scale);
    std::fill_n(outs, count * wide, 0.f);
    std::fill_n(highest, rows_kept, LOWEST);
    std::fill_n(total, rows_kept, 0.f);
    std::fill_n(sums, rows_kept * SUMS, 0.f);
    for (int64_t s = 0; s < S; s += KEYS) {
      const Range all{s, std::min(S, s + KEYS)};
      bool laid_out = false;
      for (const auto& [queries, keys, whole] : blocks[b]) {
        const int64_t i = queries.start - first, rows = queries.size();
        const Range range = keys.both(all);
        if (i < 0 || i >= count || range.start >= range.stop) continue;
        if (!laid_out) {
          transpose(all.size(), H, key + key_row(b, s, n) * H, K * H, k, block);
          copy(all.size(), V, value + key_row(b, s, n) * V, K * V, v, wide);
          laid_out = true;
        }
        const int64_t offset = range.start - s;
        multiply(rows, padded(range.size()), H, {q + i * H, H, 1}, k + offset, block,
                 logits, block, false);
        const Rows group{logits, block, outs + i * wide, wide, highest + i, total + i,
                         sums + i, rows_kept};
        for (int64_t r = 0; r < rows; r += W)
          softmax(b, n, first + i + r, std::min<int64_t>(W, rows - r), range, whole,
                  range.start > keys.start, group.from(r));
        multiply(rows, wide, range.size(), {logits, block, 1}, v + offset * wide, wide,
                 outs + i * wide, wide, true);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = row(b, first + i, n);
      const float factor = total[i] == 0 ? 0 : 1 / total[i];
      maximum[r] = highest[i];
      reciprocal[r] = factor;
      scale_to(V, outs + i * wide, factor, out + r * V);
    }
    if (statistics)
      summarize(count, highest, total, sums, rows_kept, statistics + task * SUMMARY);
  }

  // Write the totals over `count` rows, leaving out those that see nothing: the sums
  // over weights, the largest weights, the number of rows; and the largest maximum.
  static void summarize(int64_t count, const float* highest, const float* total,
                        const float* sums, int64_t rows_kept, float* to) {
    Vector found[SUMS + 2] = {}, largest = Vector{} + LOWEST;
    for (int64_t i = 0; i < count; i += W) {
      Bits seen;
      for (int64_t r = 0; r < W; ++r) seen[r] = -(i + r < count);
      seen &= at(total + i) != 0.f;  // true for NaN
      const Vector factor = seen ? 1.f / at(total + i) : Vector{};
      for (int j = 0; j < SUMS; ++j)
        found[j] += seen ? at(sums + j * rows_kept + i) * factor : Vector{};
      found[SUMS] += factor;
      found[SUMS + 1] += seen ? Vector{} + 1.f : Vector{};
      largest = seen ? higher(at(highest + i), largest) : largest;
    }
    for (int j = 0; j < SUMMARY - 1; ++j) {
      to[j] = 0;
      for (int r = 0; r < W; ++r) to[j] += found[j][r];
    }
    to[SUMMARY - 1] = LOWEST;
    for (int r = 0; r < W; ++r) to[SUMMARY - 1] = std::max(to[SUMMARY - 1], largest[r]);
  }

  // Working memory of some rows. Rows of `logits` and `outs` have `block` and `wide`
  // floats. `highest` and `total` have one float per row; `sums` is one array of
  // `rows_kept` floats per statistic.
  struct Rows {
    float* logits;
    int64_t block;
    float* outs;
    int64_t wide;
    float *highest, *total, *sums;
    int64_t rows_kept;

    Rows from(int64_t r) const {
      return {logits + r * block, block, outs + r * wide, wide,
              highest + r, total + r, sums + r, rows_kept};
    }
  };

  // Replace the logits of `count` <= W rows, for queries starting at t, by exponentials
  // and accumulate these. If `again`, earlier sums are rescaled to the new maximum.
  void softmax(int64_t b, int64_t n, int64_t t, int64_t count, Range range, bool whole,
               bool again, Rows rows) const {
    const int64_t width = padded(range.size());
    Vector most[W], more[W], energy[W], distance[W], indices;
    for (int i = 0; i < W; ++i) indices[i] = i;
    for (int64_t r = 0; r < W; ++r) {
      most[r] = Vector{} + EMPTY;
      more[r] = energy[r] = distance[r] = Vector{};
    }
    for (int64_t r = 0; r < count; ++r) {
      float* logits = rows.logits + r * rows.block;
      lean(logits, b, n, t + r, range);
      hide(logits, b, n, t + r, range, whole);
      for (int64_t s = 0; s < width; s += W) most[r] = higher(at(logits + s), most[r]);
    }
    const Vector before = at(rows.highest);
    at(rows.highest) = higher(reduced(most, higher), before);
    for (int64_t r = 0; again && r < count; ++r)
      if (rows.highest[r] > before[r]) rescale(rows.from(r), before[r]);
    for (int64_t r = 0; r < count; ++r) {
      float* logits = rows.logits + r * rows.block;
      const float highest = rows.highest[r];
      if (statistics) {
        Vector offset = indices + static_cast<float>(range.start - (t + r));
        for (int64_t s = 0; s < width; s += W) {
          const Vector x = clipped(at(logits + s) - highest), e = exponential(x);
          at(logits + s) = e;
          more[r] += e;
          energy[r] += e * x;
          distance[r] += e * (offset < 0.f ? -offset : offset);
          offset += static_cast<float>(W);
        }
        for (int j = 0; j < 3; ++j) {
          const int64_t s = t + r + j - 1 - range.start;
          if (s >= 0 && s < width) rows.sums[(2 + j) * rows.rows_kept + r] += logits[s];
        }
      } else {
        for (int64_t s = 0; s < width; s += W) {
          at(logits + s) = exponential(clipped(at(logits + s) - highest));
          more[r] += at(logits + s);
        }
      }
      if (dropout_keys) drop(logits, b, n, t + r, range);
    }
    at(rows.total) += reduced(more, added);
    if (!statistics) return;
    at(rows.sums) += reduced(energy, added);
    at(rows.sums + rows.rows_kept) += reduced(distance, added);
  }

  // Rescale what a row has accumulated to its new maximum.
  void rescale(Rows row, float before) const {
    const float factor = std::exp(before - *row.highest);
    for (int64_t c = 0; c < padded(V); c += W) at(row.outs + c) *= factor;
    // Bounded: the product of two very large numbers would be infinite.
    row.sums[0] += std::max(before - *row.highest, -1e4f) * *row.total;
    for (int j = 0; j < SUMS; ++j) row.sums[j * row.rows_kept] *= factor;
    *row.total *= factor;
  }
};

template <typename Element>
struct Backward : Problem {
  const Element *query, *key, *value;
  const float *maximum, *reciprocal;
  const Element* out_gradient;
  const float* delta;
  // Key and value gradients are `B S N H` and `B S N V`: separate per query head.
  Element *query_gradient, *key_gradient, *value_gradient;
  float* bias_gradient;  // `B N T S` or none

  int64_t tasks() const { return batch * N; }

  void run(int64_t task) const {
    const int64_t b = task / N, n = task % N;
    const int64_t deep = padded(H), wide = padded(V);
    const int64_t block = padded(std::min(KEYS, S)) + W;
    Scratch scratch(10, T * (2 * deep + wide) +
                            block * (2 * deep + H + wide + V + 2 * ROWS));
    float* q = scratch.take(T * deep);
    float* dq = scratch.take(T * deep);
    float* d_out = scratch.take(T * wide);
    float* k = scratch.take(block * deep);
    float* k_turned = scratch.take(H * block);
    float* v_turned = scratch.take(V * block);
    float* dk = scratch.take(block * deep);
    float* dv = scratch.take(block * wide);
    float* weights = scratch.take(ROWS * block);
    float* gradient = scratch.take(ROWS * block);
    copy(T, H, query + row(b, 0, n) * H, N * H, q, deep, scale);
    copy(T, V, out_gradient + row(b, 0, n) * V, N * V, d_out, wide);
    std::fill_n(dq, T * deep, 0.f);
    float* by_bias = bias_gradient ? bias_gradient + task * T * S : nullptr;
    if (by_bias) std::fill_n(by_bias, T * S, 0.f);
    for (int64_t s = 0; s < S; s += KEYS) {
      const Range all{s, std::min(S, s + KEYS)};
      bool laid_out = false;
      std::fill_n(dk, block * (H < W ? H : deep), 0.f);
      std::fill_n(dv, block * (V < W ? V : wide), 0.f);
      for (const auto& [queries, keys, whole] : blocks[b]) {
        const Range range = keys.both(all);
        if (range.start >= range.stop) continue;
        const int64_t i = queries.start, rows = queries.size();
        if (!laid_out) {
          const Element* from = key + key_row(b, s, n) * H;
          copy(all.size(), H, from, K * H, k, deep);
          transpose(all.size(), H, from, K * H, k_turned, block);
          from = value + key_row(b, s, n) * V;
          transpose(all.size(), V, from, K * V, v_turned, block);
          laid_out = true;
        }
        const int64_t offset = range.start - s, width = padded(range.size());
        const float *q_here = q + i * deep, *d_here = d_out + i * wide;
        multiply(rows, width, H, {q_here, deep, 1}, k_turned + offset, block, weights,
                 block, false);
        multiply(rows, width, V, {d_here, wide, 1}, v_turned + offset, block, gradient,
                 block, false);
        for (int64_t r = 0; r < rows; ++r)
          softmax(b, n, i + r, range, whole, weights + r * block,
                  gradient + r * block);
        if (by_bias)
          for (int64_t r = 0; r < rows; ++r)
            std::copy_n(gradient + r * block, range.size(),
                        by_bias + (i + r) * S + range.start);
        add_product(rows, range, offset, V, wide, weights, d_here, block, dv);
        add_product(rows, range, offset, H, deep, gradient, q_here, block, dk);
        multiply(rows, deep, range.size(), {gradient, block, 1}, k + offset * deep,
                 deep, dq + i * deep, deep, true);
      }
      const int64_t r = (b * S + s) * N + n;
      take_keys(dk, all.size(), H, deep, block, key_gradient + r * H);
      take_keys(dv, all.size(), V, wide, block, value_gradient + r * V);
    }
    for (int64_t t = 0; t < T; ++t)
      scale_to(H, dq + t * deep, scale, query_gradient + row(b, t, n) * H);
  }

  // Multiply a transposed block of the map by an array of its queries, and add the
  // product to `keys`, an array of its keys. For heads narrower than a vector, `keys`
  // is transposed: a vector then holds many keys rather than one mostly empty head.
  static void add_product(int64_t rows, Range range, int64_t offset, int64_t size,
                          int64_t width, const float* map, const float* queries,
                          int64_t block, float* keys) {
    if (size < W)
      multiply(size, padded(range.size()), rows, {queries, 1, width}, map, block,
               keys + offset, block, true);
    else
      multiply(range.size(), width, rows, {map, 1, block}, queries, width,
               keys + offset * width, width, true);
  }

  // Copy the array that `add_product` fills to its keys' rows in an array of all heads.
  void take_keys(const float* keys, int64_t count, int64_t size, int64_t width,
                 int64_t block, Element* to) const {
    if (size < W) return transpose(size, count, keys, block, to, N * size, false);
    for (int64_t j = 0; j < count; ++j)
      scale_to(size, keys + j * width, 1, to + j * N * size);
  }

  // Replace a row's logits by its weights after dropout, and the gradient with respect
  // to these by the gradient with respect to the logits.
  void softmax(int64_t b, int64_t n, int64_t t, Range range, bool whole,
               float* weights, float* gradient) const {
    const int64_t r = row(b, t, n);
    lean(weights, b, n, t, range);
    hide(weights, b, n, t, range, whole);
    if (dropout_keys) drop(gradient, b, n, t, range);
    for (int64_t s = 0; s < padded(range.size()); s += W) {
      const Vector x = clipped(at(weights + s) - maximum[r]);
      const Vector weight = exponential(x) * reciprocal[r];
      at(weights + s) = weight;
      at(gradient + s) = weight * (at(gradient + s) - delta[r]);
    }
    if (dropout_keys) drop(weights, b, n, t, range);
  }
};

// Run every task on this thread and on idle threads of XLA's pool.
template <typename Work>
ffi::Error run(const Work& work, ffi::ThreadPool& pool) {
  struct State {
    const Work work;
    const int64_t count, several;  // tasks in total, and tasks claimed at a time
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    std::condition_variable finished;

    // Claim several tasks at a time: successive tasks write to the same cache lines.
    State(const Work& work, int64_t threads)
        : work(work), count(work.tasks()),
          several(std::clamp<int64_t>(count / (8 * threads), 1, work.N)) {}
    void help() {
      int64_t mine = 0;
      for (int64_t first; (first = next.fetch_add(several)) < count;) {
        for (int64_t task = first; task < std::min(count, first + several); ++task) {
          try {
            work.run(task);
          } catch (const std::bad_alloc&) {
            failed = true;
          }
          ++mine;
        }
      }
      if (mine && (done += mine) == count) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  };
  // Shared ownership, because a helper may start after all tasks are done.
  const int64_t threads = pool.num_threads();
  const auto state = std::make_shared<State>(work, threads);
  const int64_t helpers = std::min(threads, state->count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([state] { state->help(); });
  state->help();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->done == state->count; });
  if (state->failed)
    return {ffi::ErrorCode::kResourceExhausted, "no memory for attention"};
  return ffi::Error::Success();
}

template <typename Any>
int64_t size(const Any& x, int from_last) {
  return x.dimensions()[x.dimensions().size() - from_last];
}

// Return an array's data, or null if it is empty.
template <typename Any>
auto* given(const Any& x) {
  return x.element_count() ? x.typed_data() : nullptr;
}

template <typename Elements>
Problem problem(float scale, bool is_causal, int64_t left, int64_t right,
                int32_t dropped, float kept, Elements query, Elements key,
                Elements value, Floats bias, Booleans mask, Floats slopes,
                Integers dropout_keys, Integers query_lengths, Integers key_lengths,
                Integers query_ids, Integers key_ids) {
  Problem p;
  p.B = size(query, 4), p.T = size(query, 3), p.N = size(query, 2);
  p.S = size(key, 3), p.K = size(key, 2);
  p.H = size(query, 1), p.V = size(value, 1);
  p.batch = query.element_count() / (p.T * p.N * p.H);
  p.mask = given(mask);
  for (int i = 0; i < 4; ++i) p.mask_sizes[i] = size(mask, 4 - i);
  p.bias = given(bias);
  for (int i = 0; i < 4; ++i) p.bias_sizes[i] = size(bias, 4 - i);
  p.slopes = given(slopes), p.dropout_keys = given(dropout_keys);
  p.dropped = dropped, p.kept = kept;
  p.query_lengths = given(query_lengths), p.key_lengths = given(key_lengths);
  p.query_ids = given(query_ids), p.key_ids = given(key_ids);
  p.scale = scale, p.is_causal = is_causal, p.left = left, p.right = right;
  p.find_blocks();
  return p;
}

template <typename Element>
ffi::Error forward(ffi::ThreadPool pool, float scale, bool is_causal, int64_t left,
                   int64_t right, int32_t dropped, float kept, Array<Element> query,
                   Array<Element> key, Array<Element> value, Floats bias, Booleans mask,
                   Floats slopes, Integers dropout_keys, Integers query_lengths,
                   Integers key_lengths, Integers query_ids, Integers key_ids,
                   ffi::Result<Array<Element>> out, ffi::Result<Floats> maximum,
                   ffi::Result<Floats> reciprocal, ffi::Result<Floats> statistics) {
  const Problem p = problem(scale, is_causal, left, right, dropped, kept, query, key,
                            value, bias, mask, slopes, dropout_keys, query_lengths,
                            key_lengths, query_ids, key_ids);
  const Forward<Element> task{p, query.typed_data(), key.typed_data(),
                              value.typed_data(), out->typed_data(),
                              maximum->typed_data(), reciprocal->typed_data(),
                              given(*statistics)};
  const int64_t size = p.batch * p.N * task.parts() * task.SUMMARY;
  if (task.statistics && int64_t(statistics->element_count()) != size)
    return ffi::Error::InvalidArgument("the statistics' buffer has another size");
  return run(task, pool);
}

template <typename Element>
ffi::Error backward(ffi::ThreadPool pool, float scale, bool is_causal, int64_t left,
                    int64_t right, int32_t dropped, float kept, Array<Element> query,
                    Array<Element> key, Array<Element> value, Floats bias,
                    Booleans mask, Floats slopes, Integers dropout_keys,
                    Integers query_lengths, Integers key_lengths, Integers query_ids,
                    Integers key_ids, Floats maximum, Floats reciprocal,
                    Array<Element> out_gradient, Floats delta,
                    ffi::Result<Array<Element>> query_gradient,
                    ffi::Result<Array<Element>> key_gradient,
                    ffi::Result<Array<Element>> value_gradient,
                    ffi::Result<Floats> bias_gradient) {
  const Problem p = problem(scale, is_causal, left, right, dropped, kept, query, key,
                            value, bias, mask, slopes, dropout_keys, query_lengths,
                            key_lengths, query_ids, key_ids);
  const Backward<Element> work{p, query.typed_data(), key.typed_data(),
                               value.typed_data(), maximum.typed_data(),
                               reciprocal.typed_data(), out_gradient.typed_data(),
                               delta.typed_data(), query_gradient->typed_data(),
                               key_gradient->typed_data(),
                               value_gradient->typed_data(), given(*bias_gradient)};
  return run(work, pool);
}

template <typename Element>
auto binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Attr<float>("scale")
      .Attr<bool>("is_causal")
      .Attr<int64_t>("left")
      .Attr<int64_t>("right")
      .Attr<int32_t>("dropped")
      .Attr<float>("kept")
      .template Arg<Array<Element>>()
      .template Arg<Array<Element>>()
      .template Arg<Array<Element>>()
      .template Arg<Floats>()
      .template Arg<Booleans>()
      .template Arg<Floats>()
      .template Arg<Integers>()
      .template Arg<Integers>()
      .template Arg<Integers>()
      .template Arg<Integers>()
      .template Arg<Integers>();
}

template <typename Element>
auto forward_binding() {
  return binding<Element>()
      .template Ret<Array<Element>>()
      .template Ret<Floats>()
      .template Ret<Floats>()
      .template Ret<Floats>();
}

template <typename Element>
auto backward_binding() {
  return binding<Element>()
      .template Arg<Floats>()
      .template Arg<Floats>()
      .template Arg<Array<Element>>()
      .template Arg<Floats>()
      .template Ret<Array<Element>>()
      .template Ret<Array<Element>>()
      .template Ret<Array<Element>>()
      .template Ret<Floats>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(attention_forward_float32, forward<float>,
                              forward_binding<float>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(attention_forward_bfloat16, forward<BFloat16>,
                              forward_binding<BFloat16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(attention_backward_float32, backward<float>,
                              backward_binding<float>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(attention_backward_bfloat16, backward<BFloat16>,
                              backward_binding<BFloat16>());
