// Conversions of canonical sums on a CPU, each in one pass over memory: torch's own operations take
// two or three (measured: 3.3, 2.1 and 1.6 times as long), and several more for each row's scale. hvdtrain/exchange/rounding.py describes
// them, calls them as torch.ops.hvdtrain, and has the same by torch's operations for other devices.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <ATen/ATen.h>
#include <torch/library.h>

namespace hvdtrain {

constexpr int64_t kBlock = 256;  // elements of a row, which share an exponent

template <typename Float>
struct Format;

template <>
struct Format<float> {
  using Integer = int32_t;
  static constexpr int kMantissaBits = 23, kBias = 127, kInfinite = 255;
};

template <>
struct Format<double> {
  using Integer = int64_t;
  static constexpr int kMantissaBits = 52, kBias = 1023, kInfinite = 2047;
};

// 2^exponent, of a normal number.
template <typename Float>
Float Power(int32_t exponent) {
  using Integer = typename Format<Float>::Integer;
  Integer bits = Integer(exponent + Format<Float>::kBias) << Format<Float>::kMantissaBits;
  Float power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

// Raises each row's field to that of its largest finite magnitude, and the last field, which is of
// no row, to that of infinities if an element is infinite or NaN. Without a sign, the bits of floats
// are in the order of their values; infinities and NaNs come last.
template <typename Float>
void RaiseFields(const Float* values, int64_t rows, int32_t* fields) {
  using Integer = typename Format<Float>::Integer;
  constexpr Integer kMagnitude = ~(Integer(1) << (8 * sizeof(Integer) - 1));
  constexpr Integer kInfinite = Integer(Format<Float>::kInfinite) << Format<Float>::kMantissaBits;
  const auto* bits = reinterpret_cast<const Integer*>(values);
  for (int64_t row = 0; row < rows; ++row, bits += kBlock) {
    Integer largest = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      Integer magnitude = bits[i] & kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= kInfinite) {
      fields[rows] = Format<Float>::kInfinite;
      largest = 0;
      for (int64_t i = 0; i < kBlock; ++i) {
        Integer magnitude = bits[i] & kMagnitude;
        largest = magnitude > largest && magnitude < kInfinite ? magnitude : largest;
      }
    }
    auto field = static_cast<int32_t>(largest >> Format<Float>::kMantissaBits);
    fields[row] = field > fields[row] ? field : fields[row];
  }
}

// The integers of a row whose largest magnitude has `field` are multiples of 2^-shift.
template <typename Float>
int32_t Shift(int32_t field, int32_t top) {
  return std::min(top - field, Format<Float>::kBias - 1);
}

template <bool kAdds, typename Float>
void Round(const Float* values, const int32_t* fields, int32_t top, int64_t rows,
           typename Format<Float>::Integer* integers) {
  for (int64_t row = 0; row < rows; ++row, values += kBlock, integers += kBlock) {
    Float scale = Power<Float>(Shift<Float>(fields[row], top));
    for (int64_t i = 0; i < kBlock; ++i) {
      auto rounded = static_cast<typename Format<Float>::Integer>(
          std::nearbyint(values[i] * scale));  // ties to even
      integers[i] = kAdds ? integers[i] + rounded : rounded;
    }
  }
}

template <typename Float>
void Convert(const typename Format<Float>::Integer* integers, const int32_t* fields, int32_t top,
             int64_t rows, Float* values) {
  for (int64_t row = 0; row < rows; ++row, values += kBlock, integers += kBlock) {
    Float quantum = Power<Float>(-Shift<Float>(fields[row], top));
    for (int64_t i = 0; i < kBlock; ++i) {
      values[i] = static_cast<Float>(integers[i]) * quantum;
    }
  }
}

// All are contiguous: values and integers rows of kBlock, fields int32, one for each row and one
// more.
inline void Check(const at::Tensor& rows, const at::Tensor& fields) {
  TORCH_CHECK(rows.is_contiguous() && fields.is_contiguous() && rows.dim() == 2 &&
                  rows.size(1) == kBlock && fields.numel() == rows.size(0) + 1,
              "rows of ", kBlock, " and one number for each and one more, contiguous, not ",
              rows.sizes(), " and ", fields.sizes());
}

inline void RaiseFieldsOf(const at::Tensor& values, at::Tensor fields) {
  Check(values, fields);
  AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "raise_fields", [&] {
    RaiseFields(values.const_data_ptr<scalar_t>(), values.size(0), fields.data_ptr<int32_t>());
  });
}

inline void RoundTo(at::Tensor integers, const at::Tensor& values, const at::Tensor& fields,
                    int64_t top, bool adds) {
  Check(integers, fields);
  Check(values, fields);
  AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "round_to", [&] {
    auto round = adds ? Round<true, scalar_t> : Round<false, scalar_t>;
    round(values.const_data_ptr<scalar_t>(), fields.const_data_ptr<int32_t>(),
          static_cast<int32_t>(top), values.size(0),
          integers.data_ptr<typename Format<scalar_t>::Integer>());
  });
}

inline void ConvertTo(at::Tensor values, const at::Tensor& integers, const at::Tensor& fields,
                      int64_t top) {
  Check(values, fields);
  Check(integers, fields);
  AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "convert_to", [&] {
    Convert(integers.const_data_ptr<typename Format<scalar_t>::Integer>(),
            fields.const_data_ptr<int32_t>(), static_cast<int32_t>(top), values.size(0),
            values.data_ptr<scalar_t>());
  });
}

}  // namespace hvdtrain

TORCH_LIBRARY(hvdtrain, library) {
  library.def("raise_fields(Tensor values, Tensor(a!) fields) -> ()");
  library.def("round_to(Tensor(a!) integers, Tensor values, Tensor fields, int top, bool adds) -> ()");
  library.def("convert_to(Tensor(a!) values, Tensor integers, Tensor fields, int top) -> ()");
}

TORCH_LIBRARY_IMPL(hvdtrain, CPU, library) {
  library.impl("raise_fields", hvdtrain::RaiseFieldsOf);
  library.impl("round_to", hvdtrain::RoundTo);
  library.impl("convert_to", hvdtrain::ConvertTo);
}
