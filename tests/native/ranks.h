// Ranks as threads of one process: messages between them, random delays, and a rank that ends.

#ifndef TESTS_NATIVE_RANKS_H
#define TESTS_NATIVE_RANKS_H

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

struct RankEnds {}; // thrown in a rank that ends in the middle of a sum

inline thread_local std::mt19937 chance;
inline thread_local int64_t calls_left = INT64_MAX; // until this rank ends
inline thread_local int64_t pauses_after = -1;      // so many calls, for a second

// Called by each function of MPI and Gloo: a random delay, or the end of this rank.
inline void Delay() {
  if (--calls_left < 0) {
    throw RankEnds{};
  }
  if (pauses_after >= 0 && pauses_after-- == 0) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  if (unsigned draw = chance() % 64; draw == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(chance() % 300));
  } else if (draw < 16) {
    std::this_thread::yield();
  }
}

// A message: copied when it is sent, or read from the sender's memory when it is received.
struct Message {
  const char* at;
  size_t bytes;
  std::vector<char> copied;
  bool is_done = false; // for the sender
};

// All messages, in order between two ranks for each tag.
class Mail {
public:
  using Way = std::tuple<int, int, uint64_t>; // from, to, tag

  static std::shared_ptr<Message> Write(const void* at, size_t bytes) {
    auto message = std::make_shared<Message>();
    message->at = static_cast<const char*>(at);
    message->bytes = bytes;
    if (chance() % 2) {
      Copy(*message);
    }
    return message;
  }

  // The sender's memory is about to go.
  void Settle(Message& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!message.is_done) {
      Copy(message);
    }
  }

  void Send(Way way, std::shared_ptr<Message> message) {
    std::lock_guard<std::mutex> lock(mutex_);
    sent_[way].push_back(std::move(message));
    changed_.notify_all();
  }

  // Return the number that the message to a receive has, in the order in which they are posted.
  size_t Post(Way way) {
    std::lock_guard<std::mutex> lock(mutex_);
    return posted_[way]++;
  }

  bool IsDone(const Message& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    return message.is_done;
  }

  // Return whether the message was there and has been copied to `into`.
  bool Receive(Way way, size_t number, void* into, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    return Take(way, number, into, bytes);
  }

  // Wait for it, for at most four seconds.
  void Await(const std::function<bool()>& is_done) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(4), is_done)) {
      throw std::runtime_error("timed out");
    }
  }

  bool Take(Way way, size_t number, void* into, size_t bytes) { // locked
    auto& sent = sent_[way];
    if (number >= sent.size()) {
      return false;
    }
    Message& message = *sent[number];
    if (message.bytes != bytes) {
      throw std::logic_error("a message of " + std::to_string(message.bytes) + " bytes for " +
                             std::to_string(bytes));
    }
    std::memcpy(into, message.at, bytes);
    message.is_done = true;
    changed_.notify_all();
    sent[number] = nullptr;
    return true;
  }

private:
  static void Copy(Message& message) {
    message.copied.assign(message.at, message.at + message.bytes);
    message.at = message.copied.data();
    message.is_done = true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Way, std::vector<std::shared_ptr<Message>>> sent_;
  std::map<Way, size_t> posted_;
};

#endif // TESTS_NATIVE_RANKS_H
