// The functions of MPI that sums call, between threads.

#ifndef TESTS_NATIVE_MPI_H
#define TESTS_NATIVE_MPI_H

#include <deque>

#include "ranks.h"

enum MPI_Datatype { MPI_DATATYPE_NULL, MPI_BYTE, MPI_INT, MPI_FLOAT, MPI_DOUBLE, MPI_LONG_LONG_INT };
enum MPI_Op { MPI_OP_NULL, MPI_SUM, MPI_MIN, MPI_BOR };
static constexpr int MPI_SUCCESS = 0, MPI_ANY_SOURCE = -1;
static constexpr void* MPI_STATUS_IGNORE = nullptr;
static constexpr void* MPI_COMM_NULL_COPY_FN = nullptr;

struct Sending {
  Mail::Way way;
  std::shared_ptr<Message> message;
};

// A communicator as one of its ranks has it. Its ranks are numbered from `first` on in the world.
struct Communicator {
  Mail* mail;
  int rank, size, first;
  std::deque<Sending> kept_back;
  std::map<int, void*> attributes;
  std::vector<std::shared_ptr<std::vector<float>>> kept; // values in use
};

struct Request {
  Communicator* comm;
  Mail::Way way;
  std::shared_ptr<Message> sent; // null: a receive
  size_t number;
  void* into;
  size_t bytes;
};

using MPI_Comm = Communicator*;
using MPI_Group = Communicator*;
using MPI_Request = Request*;
static constexpr MPI_Request MPI_REQUEST_NULL = nullptr;
static constexpr MPI_Comm MPI_COMM_WORLD = nullptr;
using Forget = int (*)(MPI_Comm, int, void*, void*);

inline std::map<int, Forget>& KeysOfAttributes() {
  static std::map<int, Forget> keys;
  return keys;
}

inline int BytesOf(MPI_Datatype type) { return type == MPI_BYTE ? 1 : type < MPI_LONG_LONG_INT ? 4 : 8; }

template <typename Leaves> void SendKeptBack(MPI_Comm comm, Leaves leaves) {
  while (!comm->kept_back.empty() && leaves()) {
    Sending sending = std::move(comm->kept_back.front());
    comm->kept_back.pop_front();
    comm->mail->Send(sending.way, std::move(sending.message));
  }
}

// Messages leave late, while MPI is called, as they may in Open MPI. This takes no lock if there is
// none: that would order what ranks do in shared memory.
inline void Progress(MPI_Comm comm) {
  Delay();
  SendKeptBack(comm, [] { return chance() % 4 == 0; });
}

inline int MPI_Comm_rank(MPI_Comm comm, int* rank) { return *rank = comm->rank, MPI_SUCCESS; }
inline int MPI_Comm_size(MPI_Comm comm, int* size) { return *size = comm->size, MPI_SUCCESS; }
inline int MPI_Comm_group(MPI_Comm comm, MPI_Group* group) { return *group = comm, MPI_SUCCESS; }
inline int MPI_Group_free(MPI_Group*) { return MPI_SUCCESS; }

inline int MPI_Group_translate_ranks(MPI_Group from, int, const int* ranks, MPI_Group, int* found) {
  return *found = from->first + *ranks, MPI_SUCCESS;
}

inline int MPI_Type_size(MPI_Datatype type, int* bytes) {
  return *bytes = BytesOf(type), MPI_SUCCESS;
}

inline int MPI_Isend(void* at, int items, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                     MPI_Request* request) {
  Mail::Way way{comm->rank, to, tag};
  auto message = Mail::Write(at, size_t(items) * BytesOf(type));
  comm->kept_back.push_back({way, message});
  *request = new Request{comm, way, message, 0, nullptr, 0};
  return Progress(comm), MPI_SUCCESS;
}

inline int MPI_Irecv(void* at, int items, MPI_Datatype type, int from, int tag, MPI_Comm comm,
                     MPI_Request* request) {
  Mail::Way way{from, comm->rank, tag};
  *request = new Request{comm, way, nullptr, comm->mail->Post(way), at, size_t(items) * BytesOf(type)};
  return Progress(comm), MPI_SUCCESS;
}

inline int MPI_Test(MPI_Request* request, int* done, void*) {
  Request& it = **request;
  Progress(it.comm);
  Mail& mail = *it.comm->mail;
  *done = it.sent ? mail.IsDone(*it.sent) : mail.Receive(it.way, it.number, it.into, it.bytes);
  if (*done) {
    delete *request;
    *request = MPI_REQUEST_NULL;
  }
  return MPI_SUCCESS;
}

inline int MPI_Iprobe(int, int, MPI_Comm comm, int* is_there, void*) {
  return Progress(comm), *is_there = 0, MPI_SUCCESS;
}

template <typename T> void Reduce(const void* from, void* into, int items, MPI_Op op) {
  auto* term = static_cast<const T*>(from);
  auto* sum = static_cast<T*>(into);
  for (int item = 0; item < items; ++item) {
    if constexpr (std::is_integral_v<T>) {
      sum[item] = op == MPI_BOR ? sum[item] | term[item] : std::min(sum[item], term[item]);
    } else {
      sum[item] = sum[item] + term[item];
    }
  }
}

inline int MPI_Reduce_local(const void* from, void* into, int items, MPI_Datatype type, MPI_Op op) {
  Delay();
  switch (type) {
  case MPI_FLOAT: Reduce<float>(from, into, items, op); break;
  case MPI_INT: Reduce<int>(from, into, items, op); break;
  case MPI_BYTE: Reduce<unsigned char>(from, into, items, op); break;
  default: Reduce<long long>(from, into, items, op);
  }
  return MPI_SUCCESS;
}

inline int MPI_Comm_create_keyval(void*, Forget forget, int* key, void*) {
  *key = static_cast<int>(KeysOfAttributes().size());
  return KeysOfAttributes()[*key] = forget, MPI_SUCCESS;
}

inline int MPI_Comm_set_attr(MPI_Comm comm, int key, void* value) {
  return comm->attributes[key] = value, MPI_SUCCESS;
}

inline int MPI_Comm_get_attr(MPI_Comm comm, int key, void* value, int* is_known) {
  auto found = comm->attributes.find(key);
  if ((*is_known = found != comm->attributes.end())) {
    *static_cast<void**>(value) = found->second;
  }
  return MPI_SUCCESS;
}

// As a rank calls it at its end.
inline void MPI_Finalize(MPI_Comm comm) {
  SendKeptBack(comm, [] { return true; });
}

inline void EndCommunicator(MPI_Comm comm) {
  for (auto [key, value] : comm->attributes) {
    KeysOfAttributes()[key](comm, key, value, nullptr);
  }
}

#endif // TESTS_NATIVE_MPI_H
