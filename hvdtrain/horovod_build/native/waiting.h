// Waits for other ranks: they sleep, and end by Horovod's stall limit; the pause of Horovod's thread
// between two cycles, which ends once its result is asked for. Added to Horovod's source.

#ifndef HOROVOD_WAITING_H
#define HOROVOD_WAITING_H

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace horovod {
namespace common {

inline long long NowUs() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

// The time at which any thread of this process last asked whether an operation has ended, on the
// clock of NowUs.
inline std::atomic<long long>& LastAskedUs() {
  static std::atomic<long long> at_us{0};
  return at_us;
}

// The pause of Horovod's thread until its next cycle, in which further operations may be submitted.
// It ends where a thread asks for a result after the last of them: there is nothing to wait for.
class Pause {
public:
  static Pause& Get() {
    static Pause* pause = new Pause; // never deleted: the thread may outlive static objects
    return *pause;
  }

  template <typename Duration> void Wait(Duration limit) {
    std::unique_lock<std::mutex> guard(mutex_);
    ended_.wait_for(guard, limit, [this] { return is_asked_.load(); });
    is_asked_ = false;
  }

  void End() {
    if (!is_asked_.exchange(true)) {
      std::lock_guard<std::mutex> guard(mutex_);
      ended_.notify_one();
    }
  }

  void Submitted() { is_asked_ = false; }

private:
  std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> is_asked_{false};
};

// A wait that made no progress until the stall limit. Other ranks may still use the communicator, so
// neither it nor MPI can be ended in order after that: nothing of MPI may be called.
struct Stalled : std::runtime_error {
  Stalled(long long limit_s, int rank)
      : std::runtime_error("waited " + std::to_string(limit_s) + " s for rank " +
                           std::to_string(rank) + ", which has stopped or cannot be reached "
                           "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS sets the limit)") {}
};

// The limit of a wait as Horovod's stall inspector reads it; 0: none.
inline long long StallLimitS() {
  static const long long limit_s = [] {
    auto number = [](const char* name, long long otherwise) {
      const char* text = std::getenv(name);
      return text ? std::strtoll(text, nullptr, 10) : otherwise;
    };
    long long shutdown_s = number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0);
    bool is_on = number("HOROVOD_STALL_CHECK_DISABLE", 0) <= 0 &&
                 shutdown_s >= number("HOROVOD_STALL_CHECK_TIME_SECONDS", 60);
    return is_on ? std::max(0LL, shutdown_s) : 0;
  }();
  return limit_s;
}

// Whether each rank of this host can have a core, by what the launcher said. Under a foreign one: yes.
inline bool HasOwnCore() {
  static const bool has = [] {
    for (auto name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "HOROVOD_LOCAL_SIZE"}) {
      if (const char* ranks = std::getenv(name)) {
        return std::atoll(ranks) <= std::thread::hardware_concurrency();
      }
    }
    return true;
  }();
  return has;
}

enum class WaitFor { kRanks, kMessages };

// How long a rank looks all the time, and how long it sleeps at the most after that.
struct Patience {
  static constexpr long long kAskedAgainUs = 3000;
  long long spin_us, longest_us;

  static Patience Now(WaitFor wait_for) {
    if (wait_for == WaitFor::kRanks) { // which compute
      return {50, 1000};
    }
    // The computing thread leaves its core to this one while it asks for the result. Each sleep
    // costs a wake-up then, and a rank with a core of its own sends a piece in 0.1 ms.
    bool is_free = NowUs() - LastAskedUs() < kAskedAgainUs;
    return {is_free ? (HasOwnCore() ? 2000 : 200) : 50, 250};
  }
};

// A wait of the computing thread for an operation. To sleep and be woken costs some 0.05 ms on both
// sides: where the wait before was brief, it looks all the time until this one proves longer.
class BriefWait {
public:
  ~BriefWait() { WasBrief() = LastedUs() < kBriefUs; }

  bool MayStillBeBrief() const { return HasOwnCore() && WasBrief() && LastedUs() < kBriefUs; }

private:
  static constexpr long long kBriefUs = 1000;

  static std::atomic<bool>& WasBrief() {
    static std::atomic<bool> was_brief{false};
    return was_brief;
  }

  long long LastedUs() const { return NowUs() - began_us_; }

  const long long began_us_ = NowUs();
};

// Return once `is_done()`. Throws Stalled after the limit, with the rank that `waited_for()` returns.
template <typename IsDone, typename WaitedFor>
void AwaitUntil(WaitFor wait_for, IsDone is_done, WaitedFor waited_for) {
  // Where the whole job was suspended, much time has passed between two looks, and none counts.
  constexpr long long kShortestUs = 50, kMostBetweenLooksUs = 100000;
  long long waited_us = 0, looked_us = NowUs();
  while (!is_done()) {
    long long now_us = NowUs();
    waited_us += std::min(now_us - looked_us, kMostBetweenLooksUs);
    looked_us = now_us;
    if (StallLimitS() > 0 && waited_us > 1000000 * StallLimitS()) {
      throw Stalled(StallLimitS(), waited_for());
    }
    Patience patience = Patience::Now(wait_for);
    if (waited_us < patience.spin_us) {
      std::this_thread::yield();
    } else {
      auto rest_us = std::max(kShortestUs, std::min(patience.longest_us, waited_us / 8));
      std::this_thread::sleep_for(std::chrono::microseconds(rest_us));
    }
  }
}

} // namespace common
} // namespace horovod

#endif // HOROVOD_WAITING_H
