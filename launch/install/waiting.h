// Waits that sleep. `launch/setup` adds this file to Horovod's source.

#ifndef HOROVOD_WAITING_H
#define HOROVOD_WAITING_H

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

namespace horovod {
namespace common {

inline long long NowUs() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

// When a thread of this process last asked whether an operation has ended.
inline std::atomic<long long>& LastAskedUs() {
  static std::atomic<long long> at_us{0};
  return at_us;
}

enum class WaitFor { kRanks, kMessages };

// How long a thread looks all the time, and how long it sleeps at the most after that.
struct Patience {
  long long spin_us, longest_us;

  static Patience With(WaitFor wait_for) {
    constexpr long long kAskedAgainUs = 3000;
    if (wait_for == WaitFor::kRanks) { // which compute
      return {50, 1000};
    }
    // The computing thread leaves its core to this one while it asks for the result. Each sleep
    // costs a wake-up then, and a rank with a core of its own sends a piece in 0.1 ms.
    bool is_free = NowUs() - LastAskedUs() < kAskedAgainUs;
    return {is_free ? (HasOwnCore() ? 2000 : 200) : 50, 250};
  }

  static bool HasOwnCore() {
    static const char* by_mpi = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    static const char* ranks = by_mpi ? by_mpi : std::getenv("HOROVOD_LOCAL_SIZE");
    static const bool has = !ranks || std::atoll(ranks) <= std::thread::hardware_concurrency();
    return has;
  }
};

// Return once `is_done()`. `meanwhile` is called before each sleep, with the time waited so far.
template <typename IsDone, typename Meanwhile>
void AwaitUntil(WaitFor wait_for, IsDone is_done, Meanwhile meanwhile) {
  constexpr long long kShortestUs = 50;
  long long began_us = NowUs();
  while (!is_done()) {
    long long waited_us = NowUs() - began_us;
    Patience patience = Patience::With(wait_for);
    if (waited_us < patience.spin_us) {
      std::this_thread::yield();
    } else {
      meanwhile(waited_us);
      auto rest_us = std::max(kShortestUs, std::min(patience.longest_us, waited_us / 8));
      std::this_thread::sleep_for(std::chrono::microseconds(rest_us));
    }
  }
}

} // namespace common
} // namespace horovod

#endif // HOROVOD_WAITING_H
