// When a thread last asked whether an operation has ended. Added to Horovod's source.

#ifndef HOROVOD_LAST_ASKED_H
#define HOROVOD_LAST_ASKED_H

#include <atomic>
#include <chrono>

namespace horovod {
namespace common {

inline long long NowUs() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

// The time at which any thread of this process did so, on the clock of NowUs.
inline std::atomic<long long>& LastAskedUs() {
  static std::atomic<long long> at_us{0};
  return at_us;
}

} // namespace common
} // namespace horovod

#endif // HOROVOD_LAST_ASKED_H
