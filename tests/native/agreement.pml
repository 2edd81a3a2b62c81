/* The agreement of Horovod's threads over Gloo, and the sum in shared memory after it, round by
   round: can the ranks come to a stand, or take a message of another round for one of this?

   Of Gloo (third_party/gloo/gloo in Horovod 0.28.1): transport/tcp/pair.cc, a pair of ranks, with
   two notes and the data of each message; allreduce.cc, the ring with two messages under way. Each
   atomic step is made under the pair's lock. Of ours: native/shared_memory.h and
   sleeping_mpi.h, the three counters of each rank, with one place for pieces.

   spin -a agreement.pml && cc -O2 -DSAFETY -o pan pan.c && ./pan -m100000
   A mutation, given by -D to spin, must be found: NO_RECV_NOTE, EARLY_HANDOUT. */

#define N 3
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef STEPS
#define STEPS 4          /* messages of a rank in a round: 2 (N - 1) */
#endif
#define PIECES 2         /* of a sum */
#define LEFT(r) ((r + N - 1) % N)
#define RIGHT(r) ((r + 1) % N)
#define FROM(a, b) ((a) * N + (b))

mtype = { SEND_READY, RECV_READY, DATA };

chan wire[N * N] = [8] of { mtype, byte };        /* by FROM(sender, receiver) */
chan pending_sends[N * N] = [2] of { byte };      /* that the other side has not asked for */
byte remote_recvs[N * N], remote_sends[N * N], expected_sends[N * N]; /* by FROM(own, other) */
byte posted_recvs[N * N], next_number[N * N];
byte received[N], sent[N];                        /* completions that nobody has waited for */
byte handed_out[N], added[N], taken[N];

/* Pair::send: the data follow at once if the other side waits for them. */
inline Send(own, other, number) {
  atomic {
    wire[FROM(own, other)] ! SEND_READY, 0;
    if
    :: remote_recvs[FROM(own, other)] > 0 ->
       remote_recvs[FROM(own, other)]--;
       wire[FROM(own, other)] ! DATA, number;
       sent[own]++
    :: else -> pending_sends[FROM(own, other)] ! number
    fi
  }
}

/* Pair::recv */
inline Receive(own, other) {
  atomic {
    if
    :: remote_sends[FROM(own, other)] > 0 -> remote_sends[FROM(own, other)]--
    :: else -> expected_sends[FROM(own, other)]++
    fi;
    posted_recvs[FROM(own, other)]++;
#ifndef NO_RECV_NOTE
    wire[FROM(own, other)] ! RECV_READY, 0
#endif
  }
}

/* Pair::read */
inline Read(own, other) {
  atomic {
    wire[FROM(other, own)] ? kind, number ->
    if
    :: kind == SEND_READY && expected_sends[FROM(own, other)] > 0 ->
       expected_sends[FROM(own, other)]--
    :: kind == SEND_READY && expected_sends[FROM(own, other)] == 0 ->
       remote_sends[FROM(own, other)]++
    :: kind == RECV_READY && nempty(pending_sends[FROM(own, other)]) ->
       pending_sends[FROM(own, other)] ? number;
       wire[FROM(own, other)] ! DATA, number;
       sent[own]++
    :: kind == RECV_READY && empty(pending_sends[FROM(own, other)]) ->
       remote_recvs[FROM(own, other)]++
    :: kind == DATA ->
       assert(posted_recvs[FROM(own, other)] > 0);
       posted_recvs[FROM(own, other)]--;
       assert(number == next_number[FROM(own, other)]); /* of this round, and in order */
       next_number[FROM(own, other)]++;
       received[own]++
    fi;
    kind = DATA; number = 0
  }
}

proctype Sockets(byte own) {
  mtype kind;
  byte number;
end:
  do
  :: Read(own, LEFT(own))
  :: Read(own, RIGHT(own))
  od
}

#define ALL(counter, least) (counter[0] >= least && counter[1] >= least && counter[2] >= least)

proctype Rank(byte own) {
  byte round, step;
  do
  :: round < ROUNDS ->
     step = 0;
     do /* the agreement */
     :: step < STEPS + 2 ->
        if
        :: step >= 2 ->
           atomic { received[own] > 0 -> received[own]-- };
           atomic { sent[own] > 0 -> sent[own]-- }
        :: else
        fi;
        if
        :: step < STEPS ->
           Receive(own, RIGHT(own));
           Send(own, LEFT(own), round * STEPS + step)
        :: else
        fi;
        step++
     :: else -> break
     od;
     /* the sum: each piece has the place of the one before it */
     step = 0;
     do
     :: step < PIECES ->
#ifndef EARLY_HANDOUT
        atomic { ALL(taken, round * PIECES + step) -> handed_out[own]++ };
#else
        handed_out[own]++;
#endif
        assert(handed_out[own] <= taken[LEFT(own)] + 1 && handed_out[own] <= taken[RIGHT(own)] + 1);
        atomic { ALL(handed_out, round * PIECES + step + 1) -> added[own]++ };
        atomic { ALL(added, round * PIECES + step + 1) -> taken[own]++ };
        step++
     :: else -> break
     od;
     round++
  :: else -> break
  od
}

init {
  byte rank;
  atomic {
    do
    :: rank < N -> run Sockets(rank); run Rank(rank); rank++
    :: else -> break
    od
  }
}
