/* StepBarrier and the waits of SharedGroup (lockstep/comm/backends/shm), for spin.
 *
 * All ranks run STEPS steps: write into the slot of the step, arrive, wait until all have arrived,
 * read what all wrote in this step and in the one before. Each statement below that touches shared
 * memory is one access there; all that matter are sequentially consistent there as well.
 *
 *   -DN=2, -DSTEPS=4    ranks and steps
 *   -DDEATH             one rank or none dies, anywhere; a sleep ends with its slice
 *   -DSPURIOUS          a sleep may end at any time for no reason
 *   -DMEMORY            with what the ranks write and read
 *
 * Without DEATH there is no time slice: a wake-up that is lost is a deadlock, which spin reports as
 * an invalid end state. With DEATH a slice ends only when nothing else can happen (`timeout`), and
 * then there must be something to find: a death, or what the dead one has brought about. So
 * survivors end, and end in time.
 *
 * Mutations, each of which must be found wrong (test_models.py):
 *   -DSLEEPERS_FIRST    `sleepers` is read before `count` is added to
 *   -DNO_COMPARE        the kernel does not compare before the sleep
 *   -DSLOTS=2           memory is overwritten one step too early
 *   -DRECORD_FIRST      a rank says that it has arrived before it has
 *   -DNO_LOOK           nobody looks who is alive
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef STEPS
#define STEPS 4
#endif
#ifndef SLOTS
#define SLOTS 3
#endif

/* The count wraps within the run: 16 in place of 2^32, and the first step comes shortly before. */
#define WRAP 16
#define BASE (WRAP / RANKS - 1)
#define TARGET(step) (((step) * RANKS) % WRAP)
#define REACHED(value, step) (((value) + WRAP - TARGET(step)) % WRAP < WRAP / 2)

byte count = (BASE * RANKS) % WRAP;
byte sleepers = 0;
bool asleep[RANKS];       /* In the kernel, on `count`. */
#ifdef MEMORY
byte slot[RANKS * SLOTS]; /* Which step's data it holds; 0 while it is written. */
#endif
byte record[RANKS];       /* RankRecord::step. */
byte arrived[RANKS];      /* The truth, for assertions. */
bool verdict = false;
bool died = false;
bool dead[RANKS];
bool closed[RANKS];         /* Has closed the group. */
bool completed[RANKS];
bool failed[RANKS];

inline wake_all() {
  d_step {
    do
    :: k < RANKS -> asleep[k] = false; k++
    :: else -> k = 0; break
    od
  }
}

/* The last one wakes those that sleep. */
inline arrive() {
#ifdef RECORD_FIRST
  record[me] = step;
#endif
#ifdef SLEEPERS_FIRST
  seen = sleepers;
#endif
  d_step {
    count = (count + 1) % WRAP;
    last = (count == TARGET(step));
    arrived[me] = step
  }
  if
  :: last ->
#ifndef SLEEPERS_FIRST
    seen = sleepers;
#endif
    if
    :: seen != 0 -> wake_all()
    :: else
    fi
  :: else
  fi;
  seen = 0;
  last = false;
#ifndef RECORD_FIRST
  record[me] = step
#endif
}

/* The kernel's part of a sleep: it compares and goes to sleep in one. */
inline futex_wait() {
  atomic {
    if
#ifdef NO_COMPARE
    :: asleep[me] = true
#else
    :: count == seen -> asleep[me] = true
    :: else
#endif
    fi
  }
  if
  :: !asleep[me]
#ifdef DEATH
  :: timeout ->
    asleep[me] = false;
    overslept = true;
    assert(died)
#endif
#ifdef SPURIOUS
  :: asleep[me] -> asleep[me] = false
#endif
  fi
}

inline sleep() {
  sleepers++;
  seen = count;
  if
  :: !REACHED(seen, step) -> futex_wait()
  :: else
  fi;
  seen = 0;
  sleepers--
}

/* Who has ended without having arrived fails the group; the verdict wakes all. */
inline look() {
  do
  :: j < RANKS ->
    atomic {
      if
      :: (dead[j] || closed[j]) && record[j] < step ->
        verdict = true;
        wake_all()
      :: else
      fi;
      j++
    }
  :: else -> j = 0; break
  od
}

/* `ok` is false when the group has failed. */
inline await() {
  do
  :: REACHED(count, step) -> ok = true; break
  :: else ->
    if
    :: verdict -> ok = false; break
    :: else
    fi;
    sleep();
#ifdef DEATH
#ifndef NO_LOOK
    look();
#endif
    assert(!overslept || verdict || REACHED(count, step));
    overslept = false
#endif
  od
}

inline check_step() {
  do
  :: j < RANKS ->
    assert(arrived[j] >= step);
#ifdef MEMORY
    assert(slot[j * SLOTS + step % SLOTS] == step);
    assert(step == BASE + 1 || slot[j * SLOTS + (step - 1) % SLOTS] == step - 1);
#endif
    j++
  :: else -> j = 0; break
  od
}

proctype rank(byte me) {
  byte step = BASE;
  byte seen, j, k;
  bool last, ok, overslept;
  {
    do
    :: step == BASE + STEPS -> completed[me] = true; break
    :: else ->
      step++;
#ifdef MEMORY
      slot[me * SLOTS + step % SLOTS] = 0;
      slot[me * SLOTS + step % SLOTS] = step;
#endif
      arrive();
      await();
      if
      :: ok -> ok = false; check_step()
      :: else -> failed[me] = true; break
      fi
    od;
    closed[me] = true
  } unless { dead[me] }
}

init {
  byte i = 0;
  atomic {
    do
    :: i < RANKS -> record[i] = BASE; arrived[i] = BASE; run rank(i); i++
    :: else -> break
    od
  }
#ifdef DEATH
  if
  :: atomic {
      select(i : 0 .. RANKS - 1);
      if
      :: !closed[i] -> dead[i] = true; died = true
      :: else
      fi
    }
  :: true
  fi;
#endif
  _nr_pr == 1;
  i = 0;
  do
  :: i < RANKS ->
    assert(dead[i] || completed[i] || (failed[i] && died));
    i++
  :: else -> break
  od
}
