// The sums of hvdtrain/horovod_build/native between threads as ranks: right in every bit, whatever
// the delays, and ended by an error where a rank ends; and the pause before a cycle. FEW_BYTES,
// PIECE_BYTES: of the headers.

#include <sys/mman.h>
#include <sys/stat.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "ranks.h"

// Ranks of one process would map a file at several addresses, between which no race is noticed.
static std::mutex mapped_mutex;
static std::map<void*, std::pair<ino_t, int>> mapped;

static void* MapOnce(void* at, size_t bytes, int access, int flags, int file, off_t offset) {
  std::lock_guard<std::mutex> lock(mapped_mutex);
  struct stat found;
  fstat(file, &found);
  for (auto& [begin, users] : mapped) {
    if (users.first == found.st_ino) {
      ++users.second;
      return begin;
    }
  }
  void* begin = mmap(at, bytes, access, flags, file, offset);
  mapped[begin] = {found.st_ino, 1};
  return begin;
}

static int UnmapOnce(void* begin, size_t bytes) {
  std::lock_guard<std::mutex> lock(mapped_mutex);
  return --mapped[begin].second == 0 ? (mapped.erase(begin), munmap(begin, bytes)) : 0;
}

#define mmap MapOnce
#define munmap UnmapOnce
#include "gloo_by_host.h"
#include "sleeping_mpi.h"

using horovod::common::GlooByHost;
using horovod::common::Pause;
using horovod::common::SleepingMpi;
using horovod::common::Stalled;
using horovod::common::WaitFor;

static void Require(bool is_right, const std::string& what) {
  if (!is_right) {
    std::fprintf(stderr, "WRONG: %s\n", what.c_str());
    std::_Exit(1);
  }
}

// A rank's value of an element: such that the order of addition changes the sum.
static float Term(unsigned round, int rank, int64_t item) {
  uint32_t bits = round * 7919u + rank * 104729u + static_cast<uint32_t>(item) * 31337u + 1u;
  bits ^= bits << 13, bits ^= bits >> 17, bits ^= bits << 5;
  return std::ldexp(1.0f + bits % 4096 / 4096.0f, bits / 4096 % 24);
}

static std::vector<float> Values(unsigned round, int rank, int64_t count) {
  std::vector<float> values(count);
  for (int64_t item = 0; item < count; ++item) {
    values[item] = Term(round, rank, item);
  }
  return values;
}

// The block of an element: blocks are as even as possible, the first ones longer.
static int64_t BlockOf(int64_t item, int64_t count, int64_t blocks) {
  int64_t each = count / blocks, longer = count % blocks;
  return item < longer * (each + 1) ? item / (each + 1) : longer + (item - longer * (each + 1)) / each;
}

static float SumOfRing(unsigned round, int size, int64_t item, int64_t count) {
  int64_t block = BlockOf(item, count, size);
  float sum = Term(round, block, item);
  for (int step = 1; step < size; ++step) {
    sum += Term(round, (block + step) % size, item);
  }
  return sum;
}

static float SumOfDoubling(unsigned round, int size, int64_t item) {
  int power = 1;
  while (2 * power <= size) {
    power *= 2;
  }
  std::vector<float> sums;
  for (int rank = 0; rank < size; ++rank) {
    bool has_pair = rank < 2 * (size - power);
    sums.push_back(Term(round, rank, item) + (has_pair ? Term(round, rank + 1, item) : 0.0f));
    rank += has_pair;
  }
  for (; sums.size() > 1; sums.resize(sums.size() / 2)) {
    for (size_t place = 0; place < sums.size() / 2; ++place) {
      sums[place] = sums[2 * place] + sums[2 * place + 1];
    }
  }
  return sums[0];
}

static int64_t DrawCount(std::mt19937& draws, int size) {
  const int64_t items = PIECE_BYTES / sizeof(float);
  const int64_t counts[] = {0, 1, size - 1, size, size + 1, items * size, items * size * 6 + 1,
                            int64_t(draws() % (items * size * 12)), int64_t(draws() % 40)};
  return counts[draws() % std::size(counts)];
}

// One sum over MPI, or the bits of an agreement.
static void SumOnce(MPI_Comm comm, std::mt19937& draws, bool only_long) {
  unsigned round = draws();
  int64_t count = only_long ? 900 : DrawCount(draws, comm->size);
  if (!only_long && draws() % 4 == 0) {
    long long bits = 1LL << comm->rank;
    SleepingMpi(comm, WaitFor::kRanks).Allreduce(&bits, 1, MPI_LONG_LONG_INT, MPI_BOR);
    Require(bits == (1LL << comm->size) - 1, "the bits of an agreement");
  }
  auto values = std::make_shared<std::vector<float>>(Values(round, comm->rank, count));
  comm->kept.push_back(values); // others may read what a rank that has ended sends
  int64_t infinite = count > 0 && draws() % 3 == 0 ? draws() % count : -1; // a rank's element
  if (infinite >= 0 && static_cast<int>(draws() % comm->size) == comm->rank) {
    (*values)[infinite] = std::numeric_limits<float>::infinity();
  }
  SleepingMpi sums(comm, WaitFor::kMessages);
  sums.Allreduce(values->data(), count, MPI_FLOAT, MPI_SUM);
  bool are_few = count < comm->size || count * 4 <= FEW_BYTES * comm->size;
  bool is_known = are_few || (comm->size > 1 && getenv("HOROVOD_MPI_SHARED_MEMORY")[0] == '1');
  Require(sums.IsFinite() == (is_known && infinite < 0), "whether sums are finite");
  for (int64_t item = 0; item < count; ++item) {
    float right = are_few ? SumOfDoubling(round, comm->size, item)
                          : SumOfRing(round, comm->size, item, count);
    right = item == infinite ? std::numeric_limits<float>::infinity() : right;
    Require((*values)[item] == right, "element " + std::to_string(item) + " of " +
                                          std::to_string(count) + " on rank " +
                                          std::to_string(comm->rank));
  }
  comm->kept.clear();
}

// Run a function for each rank, in threads; the number of a rank in the world is 10 more.
static void ForRanks(int size, unsigned seed, const std::function<void(MPI_Comm)>& run) {
  Mail mail;
  std::vector<Communicator> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back({&mail, rank, size, 10, {}, {}, {}});
  }
  std::vector<std::thread> threads;
  for (Communicator& comm : ranks) {
    threads.emplace_back([&comm, &run, seed] {
      chance.seed(seed * 100 + comm.rank);
      run(&comm);
      MPI_Finalize(&comm);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (Communicator& comm : ranks) {
    EndCommunicator(&comm);
  }
}

static void SumOverMpi(int rounds) {
  for (const char* in_memory : {"1", "0"}) {
    setenv("HOROVOD_MPI_SHARED_MEMORY", in_memory, 1);
    for (int size = 1; size <= 5; ++size) {
      ForRanks(size, rounds + size, [&](MPI_Comm comm) {
        std::mt19937 draws(size);
        for (int round = 0; round < rounds; ++round) {
          SumOnce(comm, draws, false);
        }
      });
    }
  }
}

// A rank ends in the middle of a sum: every other one names it, or over messages the neighbour that
// waits itself. One that only pauses is waited for.
static void EndOverMpi(bool in_memory) {
  setenv("HOROVOD_MPI_SHARED_MEMORY", in_memory ? "1" : "0", 1);
  std::vector<std::thread> worlds;
  for (int trial = 0; trial < 8; ++trial) {
    worlds.emplace_back([=] {
      int size = 2 + trial % 3, ending = trial % size;
      bool pauses = trial >= 6;
      std::atomic<int> named{0};
      ForRanks(size, trial, [&](MPI_Comm comm) {
        std::mt19937 draws(trial);
        SumOnce(comm, draws, true); // which makes the memory
        if (comm->rank == ending) {
          (pauses ? pauses_after : calls_left) = chance() % 300;
        }
        try {
          for (int round = 0; round < 40 || !pauses; ++round) {
            SumOnce(comm, draws, true);
          }
        } catch (const Stalled& stalled) {
          bool is_named = std::string(stalled.what()).find(
              " s for rank " + std::to_string(10 + ending) + ", ") != std::string::npos;
          Require(!pauses, "a pause has ended a sum");
          Require(is_named || !in_memory, std::string("another rank is named: ") + stalled.what());
          named += is_named;
        } catch (const RankEnds&) {
        }
      });
      Require(pauses || named > 0, "the rank that ended is not named");
    });
  }
  for (std::thread& world : worlds) {
    world.join();
  }
}

static float SumByHost(unsigned round, int hosts, int on_host, int64_t item) {
  float sum = 0;
  for (int host = 0; host < hosts; ++host) {
    float of_host = Term(round, host * on_host, item);
    for (int place = 1; place < on_host; ++place) {
      of_host += Term(round, host * on_host + place, item);
    }
    sum = host == 0 ? of_host : sum + of_host;
  }
  return sum;
}

// `ends`: whether a rank does so, in the middle of a sum.
static void SumOverGloo(int hosts, int on_host, int rounds, bool ends) {
  std::vector<Mail> within(hosts), between(on_host);
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int rank = 0; rank < hosts * on_host; ++rank) {
    threads.emplace_back([&, rank] {
      chance.seed(rank);
      int host = rank / on_host, place = rank % on_host;
      auto own = std::make_shared<gloo::Context>(gloo::Context{place, on_host, &within[host]});
      auto others = std::make_shared<gloo::Context>(gloo::Context{host, hosts, &between[place]});
      calls_left = ends && rank == 1 ? 50 + chance() % 200 : INT64_MAX;
      std::mt19937 draws(hosts);
      try {
        for (unsigned round = 0; round < static_cast<unsigned>(rounds); ++round) {
          int64_t count = hosts * on_host + DrawCount(draws, on_host);
          std::vector<float> values = Values(round, rank, count);
          GlooByHost<float>(own, others).Sum(values.data(), count);
          for (int64_t item = 0; item < count; ++item) {
            Require(values[item] == SumByHost(round, hosts, on_host, item), "a sum by host");
          }
        }
      } catch (const std::runtime_error&) { // of Gloo, which has limits of its own
        ++failed;
      } catch (const RankEnds&) {
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  Require(failed == (ends ? hosts * on_host - 1 : 0), "the number of ranks that end with an error");
}

// A pause ends for an ask whenever it comes, but for none before the last submission.
static void EndPauses(int rounds) {
  constexpr std::chrono::milliseconds kLimit(50);
  Pause& pause = Pause::Get();
  std::atomic<int> ended{0};
  std::thread pausing([&] {
    while (ended < rounds) {
      pause.Wait(std::chrono::minutes(1));
      ++ended;
    }
  });
  for (int round = 0; round < rounds; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(round % 7 * 20));
    pause.End();
    while (ended <= round) {
      std::this_thread::yield();
    }
  }
  pausing.join();
  pause.End();
  pause.Submitted();
  auto began = std::chrono::steady_clock::now();
  pause.Wait(kLimit);
  Require(std::chrono::steady_clock::now() - began >= kLimit, "an earlier ask has ended a pause");
}

int main(int, char** arguments) {
  const std::string what = arguments[1];
  const int rounds = std::atoi(arguments[2]);
  if (what == "mpi") {
    SumOverMpi(rounds);
  } else if (what == "mpi-ends") {
    EndOverMpi(true);
    EndOverMpi(false);
  } else if (what == "gloo") {
    for (auto [hosts, on_host] : {std::pair{1, 2}, {2, 2}, {2, 3}, {3, 2}}) {
      SumOverGloo(hosts, on_host, rounds, false);
    }
  } else if (what == "pause") {
    EndPauses(rounds);
  } else {
    SumOverGloo(2, 2, 1 << 30, true);
  }
  std::puts("right");
}
