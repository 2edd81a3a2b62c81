// Conversions of canonical sums on a CPU, each in one pass over memory: torch's own operations take
// two or three (measured: 3.3, 2.1 and 1.6 times as long), and several more for each row's scale. hvdtrain/exchange/rounding.py describes
// them, calls them as torch.ops.hvdtrain, and has the same by torch's operations for other devices.

#pragma once

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

// Whether a row has an infinity or a NaN, which raises no field. Without a sign, the bits of floats
// are in the order of their values; NaNs come last.
template <typename Float>
bool RaiseFields(const Float* values, int64_t rows, int32_t* fields) {
  using Integer = typename Format<Float>::Integer;
  constexpr Integer kMagnitude = ~(Integer(1) << (8 * sizeof(Integer) - 1));
  const auto* bits = reinterpret_cast<const Integer*>(values);
  bool all_finite = true;
  for (int64_t row = 0; row < rows; ++row, bits += kBlock) {
    Integer largest = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      Integer magnitude = bits[i] & kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
    auto field = static_cast<int32_t>(largest >> Format<Float>::kMantissaBits);
    if (field == Format<Float>::kInfinite) {
      all_finite = false;
    } else if (field > fields[row]) {
      fields[row] = field;
    }
  }
  return !all_finite;
}

template <bool kAdds, typename Float>
void Round(const Float* values, const int32_t* shifts, int64_t rows,
           typename Format<Float>::Integer* integers) {
  for (int64_t row = 0; row < rows; ++row, values += kBlock, integers += kBlock) {
    Float scale = Power<Float>(shifts[row]);
    for (int64_t i = 0; i < kBlock; ++i) {
      auto rounded = static_cast<typename Format<Float>::Integer>(
          std::nearbyint(values[i] * scale));  // ties to even
      integers[i] = kAdds ? integers[i] + rounded : rounded;
    }
  }
}

template <typename Float>
void Convert(const typename Format<Float>::Integer* integers, const int32_t* shifts, int64_t rows,
             Float* values) {
  for (int64_t row = 0; row < rows; ++row, values += kBlock, integers += kBlock) {
    Float quantum = Power<Float>(-shifts[row]);
    for (int64_t i = 0; i < kBlock; ++i) {
      values[i] = static_cast<Float>(integers[i]) * quantum;
    }
  }
}

// The tensors are contiguous: rows of kBlock values or integers, and an int32 for each row.
inline const int32_t* Checked(const at::Tensor& rows, const at::Tensor& of_rows) {
  TORCH_CHECK(rows.is_contiguous() && of_rows.is_contiguous() && rows.dim() == 2 &&
                  rows.size(1) == kBlock && of_rows.numel() == rows.size(0),
              "rows of ", kBlock, " and one number for each, contiguous, not ", rows.sizes(),
              " and ", of_rows.sizes());
  return of_rows.const_data_ptr<int32_t>();
}

inline bool RaiseFieldsOf(const at::Tensor& values, at::Tensor fields) {
  Checked(values, fields);
  return AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "raise_fields", [&] {
    return RaiseFields(values.const_data_ptr<scalar_t>(), values.size(0),
                       fields.data_ptr<int32_t>());
  });
}

inline void RoundTo(at::Tensor integers, const at::Tensor& values, const at::Tensor& shifts,
                    bool adds) {
  Checked(integers, shifts);
  const int32_t* of_rows = Checked(values, shifts);
  AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "round_to", [&] {
    auto convert = adds ? Round<true, scalar_t> : Round<false, scalar_t>;
    convert(values.const_data_ptr<scalar_t>(), of_rows, values.size(0),
            integers.data_ptr<typename Format<scalar_t>::Integer>());
  });
}

inline at::Tensor Converted(const at::Tensor& integers, const at::Tensor& shifts) {
  const int32_t* of_rows = Checked(integers, shifts);
  auto dtype = integers.scalar_type() == at::kInt ? at::kFloat : at::kDouble;
  auto values = at::empty(integers.sizes(), integers.options().dtype(dtype));
  AT_DISPATCH_FLOATING_TYPES(dtype, "converted", [&] {
    Convert(integers.const_data_ptr<typename Format<scalar_t>::Integer>(), of_rows,
            integers.size(0), values.data_ptr<scalar_t>());
  });
  return values;
}

}  // namespace hvdtrain

TORCH_LIBRARY(hvdtrain, library) {
  library.def("raise_fields(Tensor values, Tensor(a!) fields) -> bool");
  library.def("round_to(Tensor(a!) integers, Tensor values, Tensor shifts, bool adds) -> ()");
  library.def("converted(Tensor integers, Tensor shifts) -> Tensor");
}

TORCH_LIBRARY_IMPL(hvdtrain, CPU, library) {
  library.impl("raise_fields", hvdtrain::RaiseFieldsOf);
  library.impl("round_to", hvdtrain::RoundTo);
  library.impl("converted", hvdtrain::Converted);
}
