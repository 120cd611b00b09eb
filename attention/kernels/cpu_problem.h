// Arguments and working memory of the kernels of `attention.kernels.cpu`.

#ifndef HEADCOUNT_NATIVE_PROBLEM_H_
#define HEADCOUNT_NATIVE_PROBLEM_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "cpu_vectors.h"

constexpr float EMPTY = -0.7f * std::numeric_limits<float>::max();  // as in masks.py
constexpr float LOWEST = EMPTY / 2;
constexpr int64_t ROWS = 24, KEYS = 128;  // largest block of the map
constexpr int64_t QUERIES = 512;  // per task, which lays out each block of keys once

struct Range {
  int64_t start, stop;
  int64_t size() const { return stop - start; }
  Range both(Range other) const {
    return {std::max(start, other.start), std::min(stop, other.stop)};
  }
};

// Some queries, and the range of keys that any of them may attend to.
struct Block {
  Range queries, keys;
  bool whole;  // whether all queries may attend to all keys, apart from the mask array
};

// A thread's working memory, reused by its next task unless it is large.
class Scratch {
 public:
  // Reserve `size` floats in total for `arrays` arrays.
  Scratch(int arrays, int64_t size) {
    std::vector<float>& memory = kept();
    size += (arrays + 1) * W;
    if (static_cast<int64_t>(memory.size()) < size) {
      memory = {};
      memory.resize(size);
    }
    const auto beyond = reinterpret_cast<uintptr_t>(memory.data()) % (4 * W);
    next_ = memory.data() + (4 * W - beyond) / 4;
  }
  ~Scratch() {
    if (kept().size() > MUCH) kept() = {};
  }
  float* take(int64_t size) {
    float* found = next_;
    next_ += padded(size);
    return found;
  }

 private:
  static constexpr size_t MUCH = size_t{1} << 24;  // floats, 64 MiB

  static std::vector<float>& kept() {
    thread_local std::vector<float> memory;
    return memory;
  }

  float* next_;
};

// Sizes of query `B T N H`, key `B S K H` and value `B S K V`, and the other arguments
// that `attention.api` documents. Axes that `jax.vmap` adds in front extend the batch.
struct Problem {
  int64_t batch, B, T, S, N, K, H, V;
  const float* bias;
  int64_t bias_sizes[4], mask_sizes[4];  // B N T S or 1
  const bool* mask;
  const float* slopes;  // N, for each trial
  const int32_t* dropout_keys;  // B T N
  int32_t dropped;  // how many of the 2^24 hash values mean dropped
  float kept;  // factor on the weights that are not dropped
  const int32_t *query_lengths, *key_lengths, *query_ids, *key_ids;
  float scale;
  bool is_causal;
  int64_t left, right;
  std::vector<std::vector<Block>> blocks;  // per batch row

  int64_t row(int64_t b, int64_t t, int64_t n) const { return (b * T + t) * N + n; }
  int64_t key_row(int64_t b, int64_t s, int64_t n) const {
    return (b * S + s) * K + n / (N / K);
  }

  // Return the keys that a query may attend to, ignoring key segments and the mask.
  Range keys(int64_t b, int64_t t) const {
    if (query_lengths && t >= query_lengths[b]) return {0, 0};
    if (query_ids && query_ids[b * T + t] == 0) return {0, 0};
    Range found{std::max<int64_t>(0, t - left), std::min(S, t + right + 1)};
    if (is_causal) found.stop = std::min(found.stop, t + 1);
    if (key_lengths) found.stop = std::min<int64_t>(found.stop, key_lengths[b]);
    return found;
  }

  // Return the end of the block of queries that starts at `t`, at most `stop`. Prefer
  // the end of a segment: pairs from different segments would be computed for nothing.
  int64_t block_end(int64_t b, int64_t t, int64_t stop) const {
    stop = std::min(stop, t + ROWS);
    if (query_ids)
      for (int64_t i = t + TALL; i < stop; ++i)
        if (query_ids[b * T + i] != query_ids[b * T + i - 1]) return i;
    return stop;
  }

  Block block(int64_t b, Range queries) const {
    Block found{queries, {S, 0}, true};
    int32_t least = std::numeric_limits<int32_t>::max();
    int32_t most = std::numeric_limits<int32_t>::min();
    const Range first = keys(b, queries.start);
    for (int64_t t = queries.start; t < queries.stop; ++t) {
      const Range one = keys(b, t);
      found.whole &= one.start == first.start && one.stop == first.stop;
      if (one.start >= one.stop) continue;
      found.keys.start = std::min(found.keys.start, one.start);
      found.keys.stop = std::max(found.keys.stop, one.stop);
      if (query_ids) {
        least = std::min(least, query_ids[b * T + t]);
        most = std::max(most, query_ids[b * T + t]);
      }
    }
    if (key_ids) {
      const int32_t* ids = key_ids + b * S;
      auto outside = [&](int64_t s) { return ids[s] < least || ids[s] > most; };
      Range& range = found.keys;
      while (range.start < range.stop && outside(range.start)) ++range.start;
      while (range.start < range.stop && outside(range.stop - 1)) --range.stop;
      found.whole &= least == most;
      for (int64_t s = range.start; found.whole && s < range.stop; ++s)
        found.whole = ids[s] == least;
    }
    return found;
  }

  // Find every batch row's nonempty blocks, once for all heads.
  void find_blocks() {
    blocks.resize(batch);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t t = 0, end; t < T; t = end) {
        end = block_end(b, t, std::min(T, t / QUERIES * QUERIES + QUERIES));
        const Block found = block(b, {t, end});
        if (found.keys.start < found.keys.stop) blocks[b].push_back(found);
      }
  }

  // Location of a row of keys in an array `B N T S` with possibly broadcast axes of 1:
  // offset of the key `start`, and distance between neighbouring keys.
  struct Row {
    int64_t offset, step;
  };
  Row row_of(const int64_t found[4], int64_t b, int64_t n, int64_t t,
             int64_t start) const {
    const int64_t sizes[4] = {B, N, T, S}, place[4] = {b % B, n, t, start};
    Row at{b / B, 0};
    for (int i = 0; i < 4; ++i) {
      at.step = sizes[i] > 1 && found[i] == sizes[i];
      at.offset = at.offset * found[i] + at.step * place[i];
    }
    return at;
  }

  // Add the bias to a row of logits, and subtract the head's slope times the distance.
  void lean(float* logits, int64_t b, int64_t n, int64_t t, Range range) const {
    if (bias) {
      const Row at = row_of(bias_sizes, b, n, t, range.start);
      const float* more = bias + at.offset;
      for (int64_t s = 0; s < range.size(); ++s) logits[s] += more[s * at.step];
    }
    if (slopes) {
      const float slope = slopes[b / B * N + n];
      const int64_t first = range.start - t;
      for (int64_t s = 0; s < range.size(); ++s)
        logits[s] -= slope * static_cast<float>(std::abs(first + s));
    }
  }

  // Apply dropout to a row of weights or gradients: zero them or multiply by `kept`.
  void drop(float* row, int64_t b, int64_t n, int64_t t, Range range) const {
    const Dropout hash(dropout_keys[this->row(b, t, n)], range.start);
    for (int64_t s = 0; s < padded(range.size()); s += W)
      at(row + s) = hash(s) < dropped ? Vector{} : at(row + s) * kept;
  }

  // Set logits to EMPTY where the query may not attend, and in the padding after the
  // range of keys. `whole` is that of `Block`.
  void hide(float* logits, int64_t b, int64_t n, int64_t t, Range range,
            bool whole) const {
    const int64_t size = range.size();
    if (whole && !mask) return std::fill(logits + size, logits + padded(size), EMPTY);
    const Range seen = keys(b, t);
    const int64_t start = std::clamp<int64_t>(seen.start - range.start, 0, size);
    const int64_t stop = std::clamp<int64_t>(seen.stop - range.start, start, size);
    std::fill(logits, logits + start, EMPTY);
    if (query_ids) {
      const int32_t id = query_ids[b * T + t];
      const int32_t* ids = key_ids + b * S + range.start;
      for (int64_t s = start; s < stop; ++s)
        logits[s] = ids[s] == id ? logits[s] : EMPTY;
    }
    if (mask) {
      const Row at = row_of(mask_sizes, b, n, t, range.start);
      const bool* allowed = mask + at.offset;
      for (int64_t s = start; s < stop; ++s)
        logits[s] = allowed[s * at.step] ? logits[s] : EMPTY;
    }
    std::fill(logits + stop, logits + padded(size), EMPTY);
  }
};

#endif  // HEADCOUNT_NATIVE_PROBLEM_H_
