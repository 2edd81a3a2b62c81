// Sums over Gloo, first within each host, then over the hosts. Added to Horovod's source.
//
// With H hosts of L ranks, a ring over all N = H L ranks sends 2 (N - 1) / N of a message over the
// network link of each host, in 2 (N - 1) turns. Here it is 2 (H - 1) / H, in 2 (H - 1) turns: rank l
// of each host adds part l for its host, then adds it over the hosts with the other ranks l, and hands
// the total to its host. A message goes in pieces: one is on the network while the next is added
// within the host.
//
// The order of addition is fixed (hvdtrain/ring/orders.py): of each part, the terms of a host in the
// order of its ranks, then the sums of the hosts by Gloo's ring.

#ifndef HOROVOD_GLOO_BY_HOST_H
#define HOROVOD_GLOO_BY_HOST_H

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>

#include "controller.h"
#include "gloo/allreduce.h"
#include "gloo/context.h"
#include "gloo/math.h"
#include "gloo/transport/unbound_buffer.h"
#include "gloo/types.h"

namespace horovod {
namespace common {

// Whether a sum of so many elements is formed by host: the same answer on every rank.
inline bool IsSummedByHost(Controller& controller, int64_t elements) {
  static const char* chosen = std::getenv("HOROVOD_GLOO_HIERARCHICAL_ALLREDUCE");
  static const bool is_on = chosen && std::strcmp(chosen, "1") == 0;
  return is_on && controller.IsHomogeneous() && controller.GetLocalSize() > 1 &&
         controller.GetCrossSize() > 1 && elements >= controller.GetSize();
}

template <typename T> class GlooByHost {
public:
  // `host`: the ranks of this host. `hosts`: the ranks with this one's number on each host.
  GlooByHost(std::shared_ptr<gloo::Context> host, std::shared_ptr<gloo::Context> hosts)
      : host_(host), hosts_(hosts) {}

  // Collective: add `values` over all ranks, in place.
  void Sum(T* values, size_t count) {
    const size_t most = kPieceBytes / sizeof(T), pieces = (count + most - 1) / most;
    auto piece = [&](size_t number) {
      return Span{values + number * most, std::min(most, count - number * most)};
    };
    std::future<void> on_network;
    for (size_t number = 0; number <= pieces; ++number) {
      if (number < pieces) {
        AddWithinHost(piece(number));
      }
      if (number > 0) {
        on_network.get();
      }
      if (number < pieces) {
        Span own = Part(piece(number), host_->rank);
        on_network = std::async(std::launch::async, [this, own] { AddOverHosts(own); });
      }
      if (number > 0) {
        ShareWithinHost(piece(number - 1));
      }
    }
  }

private:
  static constexpr size_t kPieceBytes = 4 << 20;
  static constexpr uint8_t kAddPrefix = 0x40, kSharePrefix = 0x41; // Gloo has 0x01 to 0x08

  struct Span {
    T* begin;
    size_t count;
    size_t bytes() const { return count * sizeof(T); }
  };

  // The part that a rank of the host adds: as even as possible, the first ones longer.
  Span Part(Span piece, size_t rank) const {
    size_t ranks = host_->size, each = piece.count / ranks, longer = piece.count % ranks;
    return {piece.begin + rank * each + std::min(rank, longer), each + (rank < longer)};
  }

  template <typename Use> void ForOthers(Use use) const {
    for (int rank = 0; rank < host_->size; ++rank) {
      if (rank != host_->rank) {
        use(rank);
      }
    }
  }

  // Add this rank's part of all ranks of the host.
  void AddWithinHost(Span piece) {
    Span own = Part(piece, host_->rank);
    if (!terms_) { // no later piece is longer than the first
      terms_.reset(new T[own.count * host_->size]);
    }
    auto term = [&](int rank) { return terms_.get() + rank * own.count; };
    auto from = host_->createUnboundBuffer(piece.begin, piece.bytes());
    auto into = host_->createUnboundBuffer(terms_.get(), own.bytes() * host_->size);
    const uint64_t slot = gloo::Slot::build(kAddPrefix, 0);
    ForOthers([&](int rank) {
      into->recv(rank, slot, rank * own.bytes(), own.bytes());
      Span part = Part(piece, rank);
      from->send(rank, slot, (part.begin - piece.begin) * sizeof(T), part.bytes());
    });
    std::memcpy(term(host_->rank), own.begin, own.bytes());
    ForOthers([&](int) { into->waitRecv(); });
    for (int rank = 1; rank < host_->size; ++rank) {
      gloo::sum<T>(term(0), term(0), term(rank), own.count);
    }
    std::memcpy(own.begin, term(0), own.bytes());
    ForOthers([&](int) { from->waitSend(); });
  }

  // Add this rank's part, the sum of its host, over the hosts.
  void AddOverHosts(Span own) {
    gloo::AllreduceOptions options(hosts_);
    options.setOutput<T>(own.begin, own.count);
    void (*add)(void*, const void*, const void*, size_t) = &gloo::sum<T>;
    options.setReduceFunction(gloo::AllreduceOptions::Func(add));
    gloo::allreduce(options);
  }

  // Hand this rank's part to the other ranks of the host, and take theirs.
  void ShareWithinHost(Span piece) {
    auto all = host_->createUnboundBuffer(piece.begin, piece.bytes());
    const uint64_t slot = gloo::Slot::build(kSharePrefix, 0);
    auto offset = [&](Span part) { return (part.begin - piece.begin) * sizeof(T); };
    Span own = Part(piece, host_->rank);
    ForOthers([&](int rank) {
      Span part = Part(piece, rank);
      all->recv(rank, slot, offset(part), part.bytes());
      all->send(rank, slot, offset(own), own.bytes());
    });
    ForOthers([&](int) { all->waitRecv(); });
    ForOthers([&](int) { all->waitSend(); });
  }

  std::shared_ptr<gloo::Context> host_, hosts_;
  std::unique_ptr<T[]> terms_;
};

} // namespace common
} // namespace horovod

#endif // HOROVOD_GLOO_BY_HOST_H
