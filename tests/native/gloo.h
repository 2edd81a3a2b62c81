// The parts of Gloo, and of Horovod's controller, that sums by host use, between threads.

#ifndef TESTS_NATIVE_GLOO_H
#define TESTS_NATIVE_GLOO_H

#include "ranks.h"

namespace gloo {

struct Slot {
  static uint64_t build(uint8_t prefix, uint32_t slot) { return uint64_t(prefix) << 56 | slot; }
};

class Buffer {
public:
  Buffer(Mail& mail, int rank, void* at) : mail_(mail), rank_(rank), at_(static_cast<char*>(at)) {}

  ~Buffer() {
    for (auto& sent : sends_) {
      mail_.Settle(*sent);
    }
  }

  void send(int to, uint64_t slot, size_t offset, size_t bytes) {
    Delay();
    sends_.push_back(Mail::Write(at_ + offset, bytes));
    mail_.Send({rank_, to, slot}, sends_.back());
  }

  void recv(int from, uint64_t slot, size_t offset, size_t bytes) {
    Delay();
    Mail::Way way{from, rank_, slot};
    receives_.push_back({way, mail_.Post(way), at_ + offset, bytes});
  }

  void waitSend() { Wait(sends_, [](auto& sent) { return sent->is_done; }); }

  void waitRecv() {
    Wait(receives_, [this](Receive& it) { return mail_.Take(it.way, it.number, it.into, it.bytes); });
  }

private:
  struct Receive {
    Mail::Way way;
    size_t number;
    char* into;
    size_t bytes;
  };

  // Wait for any one of them.
  template <typename All, typename IsDone> void Wait(All& all, IsDone is_done) {
    Delay();
    mail_.Await([&] {
      auto found = std::find_if(all.begin(), all.end(), is_done);
      bool is_found = found != all.end();
      if (is_found) {
        all.erase(found);
      }
      return is_found;
    });
  }

  Mail& mail_;
  int rank_;
  char* at_;
  std::vector<std::shared_ptr<Message>> sends_;
  std::vector<Receive> receives_;
};

struct Context {
  int rank, size;
  Mail* mail;
  std::unique_ptr<Buffer> createUnboundBuffer(void* at, size_t) {
    return std::make_unique<Buffer>(*mail, rank, at);
  }
};

template <typename T> void sum(void* into, const void* left, const void* right, size_t count) {
  for (size_t item = 0; item < count; ++item) {
    static_cast<T*>(into)[item] =
        static_cast<const T*>(left)[item] + static_cast<const T*>(right)[item];
  }
}

struct AllreduceOptions {
  using Func = std::function<void(void*, const void*, const void*, size_t)>;
  std::shared_ptr<Context> context;
  char* at;
  size_t count, bytes;
  Func add;

  explicit AllreduceOptions(std::shared_ptr<Context> context) : context(context) {}
  template <typename T> void setOutput(T* values, size_t many) {
    at = reinterpret_cast<char*>(values);
    count = many;
    bytes = many * sizeof(T);
  }
  void setReduceFunction(Func func) { add = func; }
};

// In the order of the ranks, unlike Gloo's own.
inline void allreduce(AllreduceOptions& options) {
  Context& context = *options.context;
  std::vector<char> own(options.at, options.at + options.bytes), term(options.bytes);
  auto from = context.createUnboundBuffer(own.data(), options.bytes);
  auto into = context.createUnboundBuffer(term.data(), options.bytes);
  for (int rank = 0; rank < context.size; ++rank) {
    from->send(rank, 1, 0, options.bytes);
  }
  for (int rank = 0; rank < context.size; ++rank) {
    into->recv(rank, 1, 0, options.bytes);
    into->waitRecv();
    rank == 0 ? void(std::memcpy(options.at, term.data(), options.bytes))
              : options.add(options.at, options.at, term.data(), options.count);
  }
  for (int rank = 0; rank < context.size; ++rank) {
    from->waitSend();
  }
}

} // namespace gloo

namespace horovod {
namespace common {

struct Controller { // of one host
  bool IsHomogeneous() const { return true; }
  int GetLocalSize() const { return 1; }
  int GetCrossSize() const { return 1; }
  int GetSize() const { return 1; }
};

} // namespace common
} // namespace horovod

#endif // TESTS_NATIVE_GLOO_H
