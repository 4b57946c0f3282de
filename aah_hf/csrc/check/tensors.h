// Random tensors of every dtype and storage, threads and comparison, for the torch-free checks. Every tensor is an
// allocation of exactly its size that starts as NaN.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../include/aah_params.h"

namespace {

std::mt19937 rng;

int64_t pick(int64_t low, int64_t high) { return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1)); }

template <typename X>
X choose(std::initializer_list<X> of) {
  return *(of.begin() + pick(0, static_cast<int64_t>(of.size()) - 1));
}

int64_t element_bytes(int dtype) { return dtype == AAH_F64 ? 8 : dtype == AAH_F32 ? 4 : 2; }

double half_value(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double sign = h & 0x8000 ? -1 : 1;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

// A strided [batch, length, heads, head_dim] tensor and its values as doubles.
struct Tensor {
  int dtype;
  int64_t batch, length, heads, dim;
  char* memory;
  AahTensor view;

  Tensor(int dtype, int64_t b, int64_t t, int64_t h, int64_t d) : dtype(dtype), batch(b), length(t), heads(h), dim(d) {
    const int64_t gap = dtype == AAH_F64 ? 0 : 8 * pick(0, 1);  // rows need not touch
    const int64_t row = d + gap;
    if (pick(0, 1)) {
      view = {nullptr, t * h * row, h * row, row};
    } else {
      view = {nullptr, t * h * row, row, t * row};
    }
    const int64_t numbers = b * t * h * row - (b * t * h > 0 ? gap : 0);
    memory = static_cast<char*>(std::malloc(numbers * element_bytes(dtype)));
    view.data = memory;
    std::memset(memory, 0xff, numbers * element_bytes(dtype));  // NaN in every dtype
  }
  ~Tensor() { std::free(memory); }
  Tensor(const Tensor&) = delete;

  char* at(int64_t b, int64_t t, int64_t h, int64_t d) const {
    return memory + (b * view.batch + t * view.length + h * view.head + d) * element_bytes(dtype);
  }
  double get(int64_t b, int64_t t, int64_t h, int64_t d) const {
    const char* p = at(b, t, h, d);
    if (dtype == AAH_F64) return *reinterpret_cast<const double*>(p);
    if (dtype == AAH_F32) return *reinterpret_cast<const float*>(p);
    const uint16_t raw = *reinterpret_cast<const uint16_t*>(p);
    if (dtype == AAH_F16) return half_value(raw);
    const uint32_t wide = static_cast<uint32_t>(raw) << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  void set(int64_t b, int64_t t, int64_t h, int64_t d, double x) {
    char* p = at(b, t, h, d);
    if (dtype == AAH_F64) *reinterpret_cast<double*>(p) = x;
    if (dtype == AAH_F32) *reinterpret_cast<float*>(p) = static_cast<float>(x);
    // few bits: exact in both halves
    const float coarse = static_cast<float>(std::round(x * 16) / 16);
    uint32_t wide;
    std::memcpy(&wide, &coarse, 4);
    if (dtype == AAH_BF16) *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(wide >> 16);
    if (dtype == AAH_F16) {
      uint16_t raw = 0;
      if (coarse != 0) {  // a normal half, and exact: few bits
        const int exponent = std::ilogb(coarse);
        const double mantissa = std::ldexp(std::fabs(coarse), 10 - exponent);
        raw = static_cast<uint16_t>((coarse < 0 ? 0x8000 : 0) + ((exponent + 14) << 10) + static_cast<int>(mantissa));
      }
      *reinterpret_cast<uint16_t*>(p) = raw;
    }
  }
  void fill_row(int64_t b, int64_t t, int64_t h) {
    std::normal_distribution<double> normal;
    for (int64_t d = 0; d < dim; ++d) set(b, t, h, d, dtype == AAH_F16 ? pick(-24, 24) / 16.0 : normal(rng));
  }
};

// Numbers of the accumulator type.
struct Numbers {
  bool wide;
  std::vector<double> d;
  std::vector<float> f;
  Numbers(int dtype, int64_t n) : wide(dtype == AAH_F64), d(wide ? n : 0, NAN), f(wide ? 0 : n, NAN) {}
  void* data() { return wide ? static_cast<void*>(d.data()) : static_cast<void*>(f.data()); }
  double get(int64_t i) const { return wide ? d[i] : f[i]; }
  void set(int64_t i, double x) {
    if (wide) d[i] = x;
    else f[i] = static_cast<float>(x);
  }
};

inline void run_threads(void*, int32_t workers, AahBody body, void* argument) {
  std::vector<std::thread> pool;
  for (int32_t i = 1; i < workers; ++i) pool.emplace_back(body, argument, i);
  body(argument, 0);
  for (std::thread& t : pool) t.join();
}

double worst = 0;

// NaN-safe: a comparison that NaN cannot pass
bool close(double got, double want, double scale, double tolerance, const char* what, int number) {
  if (std::isinf(want) && got == want) return true;
  const double error = std::fabs(got - want) / std::fmax(scale, 1.0);
  if (error <= tolerance) {
    worst = std::fmax(worst, error / tolerance);
    return true;
  }
  std::printf("case %d: %s is %.9g, expected %.9g\n", number, what, got, want);
  return false;
}

}  // namespace
