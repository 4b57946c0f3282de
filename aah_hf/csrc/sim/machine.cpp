// Fibers, the scheduler, and the record of who touched which word of shared memory.
#include "machine.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace aah {
namespace sim {
namespace {

constexpr size_t kStackBytes = 256 * 1024;

const char* const kMeetings[] = {"a block barrier", "a warp barrier", "a shuffle", "a vote", "ldmatrix",
                                 "ldmatrix.trans", "mma f16", "mma bf16", "mma tf32"};

struct Copy {
  char* shared;
  const char* global;
  bool real;
};

enum State { kReady, kInWarp, kInBlock, kDone };

struct Thread {
  int index;
  State state;
  Meeting what;
  int line;
  void* arguments;
  void (*act)(void* const*);
  int block_epoch, warp_epoch;  // barriers passed
  std::vector<Copy> open;       // issued, not committed
  std::vector<std::vector<Copy>> groups;
  jmp_buf context;
  ucontext_t first;
  void* stack = nullptr;
  bool started = false;
  void* fake_stack = nullptr;
};

// Who touched a word last. A later access by another thread is ordered after it if all threads of the block, or, for lanes of
// one warp, the warp, have met at a barrier in between.
struct Access {
  int thread, block_epoch, warp_epoch, line;
};
struct Word {
  Access write, read, other_read;  // other_read: by another warp than `read`, in the same block epoch
  int copying;                     // thread whose asynchronous copy is under way, or -1
};

struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;
  int count = 0, block = 0;
  Thread* current = nullptr;
  jmp_buf scheduler;
  void (*body)(const void*) = nullptr;
  const void* argument = nullptr;
  Options options = {};
  uint64_t random = 0;
  char* shared = nullptr;
  size_t shared_bytes = 0;
  std::vector<Word> words;
  std::string error;
  void* fake_stack = nullptr;
  const void* host_stack = nullptr;
  size_t host_stack_bytes = 0;
} machine;

uint64_t next_random() {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return machine.random;
}

// AddressSanitizer wants to know of every change of stacks.
void leave_for(const void* stack, size_t bytes, void** fake) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake, stack, bytes);
#else
  (void)stack, (void)bytes, (void)fake;
#endif
}
void arrived(void* fake, bool from_host) {
#if defined(__SANITIZE_ADDRESS__)
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(fake, &stack, &bytes);
  if (from_host && !machine.host_stack) machine.host_stack = stack, machine.host_stack_bytes = bytes;
#else
  (void)fake, (void)from_host;
#endif
}

void to_scheduler() {
  Thread* self = machine.current;
  leave_for(machine.host_stack, machine.host_stack_bytes, &self->fake_stack);
  if (!_setjmp(self->context)) _longjmp(machine.scheduler, 1);
  arrived(self->fake_stack, true);
}

// A fiber runs one kernel thread after another.
void fiber() {
  arrived(nullptr, true);
  for (;;) {
    machine.body(machine.argument);
    machine.current->state = kDone;
    to_scheduler();
  }
}

void resume(Thread* t) {
  machine.current = t;
  leave_for(t->stack, kStackBytes, &machine.fake_stack);
  if (!_setjmp(machine.scheduler)) {
    if (t->started) _longjmp(t->context, 1);
    t->started = true;
    setcontext(&t->first);
  }
  arrived(machine.fake_stack, false);
  machine.current = nullptr;
}

void prepare(Thread* t) {
  if (!t->stack) {
    t->stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (t->stack == MAP_FAILED) abort();
  }
  if (!t->started) {
    getcontext(&t->first);
    t->first.uc_stack.ss_sp = t->stack;
    t->first.uc_stack.ss_size = kStackBytes;
    t->first.uc_link = nullptr;
    makecontext(&t->first, fiber, 0);
  }
}

std::string where(const Thread& t, int line) {
  return "block " + std::to_string(machine.block) + ", thread " + std::to_string(t.index) + ", line " +
         std::to_string(line);
}

void fail(const std::string& what) {
  if (machine.error.empty()) machine.error = what;
  // the kernel must not go on: its fibers are thrown away
  if (machine.current) to_scheduler();
}

bool ordered(const Access& before, const Thread& now) {
  return before.thread < 0 || before.thread == now.index || before.block_epoch < now.block_epoch ||
         (before.thread / 32 == now.index / 32 && before.warp_epoch < now.warp_epoch);
}

void touch(const void* shared, int bytes, int line, bool write) {
  Thread& self = *machine.current;
  const ptrdiff_t from = static_cast<const char*>(shared) - machine.shared;
  if (from < 0 || from + bytes > static_cast<ptrdiff_t>(machine.shared_bytes) || from % 4 != 0) {
    return fail(where(self, line) + ": shared memory at byte " + std::to_string(from) + " is outside of " +
                std::to_string(machine.shared_bytes) + " bytes");
  }
  const Access access = {self.index, self.block_epoch, self.warp_epoch, line};
  for (ptrdiff_t i = from / 4; i < (from + bytes) / 4; ++i) {
    Word& w = machine.words[i];
    const Access* clash = nullptr;
    if (w.copying >= 0) {
      return fail(where(self, line) + ": touches shared memory that an asynchronous copy of thread " +
                  std::to_string(w.copying) + " has not filled yet");
    }
    if (!ordered(w.write, self)) clash = &w.write;
    if (write && !ordered(w.read, self)) clash = &w.read;
    if (write && !ordered(w.other_read, self)) clash = &w.other_read;
    if (clash) {
      return fail(where(self, line) + ": no barrier between this and an access by thread " +
                  std::to_string(clash->thread) + ", line " + std::to_string(clash->line));
    }
    if (write) {
      w.write = access;
    } else if (w.read.block_epoch == self.block_epoch && w.read.thread / 32 != self.index / 32) {
      w.other_read = access;
    } else {
      w.read = access;
    }
  }
}

void land(const Copy& c) {
  if (c.real) {
    memcpy(c.shared, c.global, 16);
  } else {
    memset(c.shared, 0, 16);
  }
}

std::string describe(const Thread& t) {
  if (t.state == kDone) return "thread " + std::to_string(t.index) + " has returned";
  return "thread " + std::to_string(t.index) + " is at " + kMeetings[t.what] + ", line " + std::to_string(t.line);
}

// Lanes of a warp that have all stopped: what they met for happens. False if they wait for the block.
bool settle_warp(int warp) {
  Thread* lanes[32];
  for (int i = 0; i < 32; ++i) lanes[i] = machine.threads[warp * 32 + i].get();
  for (int i = 1; i < 32; ++i) {
    const Thread &a = *lanes[0], &b = *lanes[i];
    if (a.state != b.state || (a.state != kDone && (a.what != b.what || a.line != b.line))) {
      fail("block " + std::to_string(machine.block) + ": lanes diverge: " + describe(a) + ", " + describe(b));
      return false;
    }
  }
  if (lanes[0]->state != kInWarp) return false;
  void* arguments[32];
  for (int i = 0; i < 32; ++i) arguments[i] = lanes[i]->arguments;
  lanes[0]->act(arguments);
  for (Thread* t : lanes) {
    t->state = kReady;
    if (t->what == kWarpSync) ++t->warp_epoch;
  }
  return true;
}

void run_block() {
  const int warps = machine.count / 32;
  memset(machine.shared, 0xff, machine.shared_bytes);
  for (Word& w : machine.words) w = {{-1, 0, 0, 0}, {-1, 0, 0, 0}, {-1, 0, 0, 0}, -1};
  for (int i = 0; i < machine.count; ++i) {
    Thread& t = *machine.threads[i];
    t.state = kReady;
    t.block_epoch = t.warp_epoch = 0;
    t.open.clear();
    t.groups.clear();
    prepare(&t);
  }
  std::vector<int> runnable;
  int favourite = 0;
  for (;;) {
    runnable.clear();
    for (int w = 0; w < warps; ++w) {
      if (machine.threads[w * 32]->state == kReady) runnable.push_back(w);
    }
    if (runnable.empty()) {
      for (int i = 1; i < machine.count; ++i) {
        const Thread &a = *machine.threads[0], &b = *machine.threads[i];
        if (a.state != b.state || (a.state == kInBlock && a.line != b.line)) {
          return fail("block " + std::to_string(machine.block) + ": threads diverge: " + describe(a) + ", " + describe(b));
        }
      }
      if (machine.threads[0]->state == kDone) return;
      for (int i = 0; i < machine.count; ++i) {
        Thread& t = *machine.threads[i];
        t.state = kReady;
        ++t.block_epoch, ++t.warp_epoch;
      }
      continue;
    }
    // lockstep; or one warp runs ahead as far as it can, a random one or always the last
    const uint64_t seed = machine.options.seed;
    int warp = runnable[favourite++ % runnable.size()];
    if (seed % 3 == 1) warp = runnable.back();
    if (seed % 3 == 2 || (seed && seed % 3 == 0)) warp = runnable[next_random() % runnable.size()];
    int64_t steps = seed == 0 ? 1 : seed % 3 == 1 ? INT64_MAX : 1 + static_cast<int64_t>(next_random() % 300);
    while (steps-- > 0) {
      const int turn = seed ? static_cast<int>(next_random() % 32) : 0, flip = seed % 2 ? 31 : 0;
      for (int i = 0; i < 32; ++i) {
        resume(machine.threads[warp * 32 + (((i + turn) % 32) ^ flip)].get());
        if (!machine.error.empty()) return;
      }
      if (!settle_warp(warp)) break;
    }
    if (!machine.error.empty()) return;
  }
}

}  // namespace

std::string launch(int blocks, int threads, size_t shared_bytes, const Options& options, void (*body)(const void*),
                   const void* argument) {
  machine.options = options;
  machine.random = 0x9e3779b97f4a7c15ull * (options.seed + 1);
  machine.body = body;
  machine.argument = argument;
  machine.count = threads;
  machine.error.clear();
  machine.shared_bytes = shared_bytes;
  const std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(aligned_alloc(16, (shared_bytes + 15) / 16 * 16)),
                                                      free);
  machine.shared = memory.get();
  machine.words.resize((shared_bytes + 3) / 4);
  while (static_cast<int>(machine.threads.size()) < threads) {
    machine.threads.emplace_back(new Thread);
    machine.threads.back()->index = static_cast<int>(machine.threads.size()) - 1;
  }
  for (int i = 0; i < blocks && machine.error.empty(); ++i) {
    machine.block = i;
    run_block();
  }
  if (!machine.error.empty()) {
    for (auto& t : machine.threads) t->started = false;  // each is somewhere inside a kernel
  }
  return machine.error;
}

int thread_index() { return machine.current->index; }
int block_index() { return machine.block; }
char* shared_memory() { return machine.shared; }

void meet_block(int line) {
  machine.current->state = kInBlock;
  machine.current->what = kBarrier;
  machine.current->line = line;
  to_scheduler();
}

void meet_warp(Meeting what, int line, void* arguments, void (*act)(void* const*)) {
  Thread& t = *machine.current;
  t.state = kInWarp;
  t.what = what;
  t.line = line;
  t.arguments = arguments;
  t.act = act;
  to_scheduler();
}

void reads(const void* shared, int bytes, int line) { touch(shared, bytes, line, false); }
void writes(const void* shared, int bytes, int line) { touch(shared, bytes, line, true); }

void start_copy(void* shared, const void* global, bool real, int line) {
  touch(shared, 16, line, true);
  Thread& self = *machine.current;
  const Copy copy = {static_cast<char*>(shared), static_cast<const char*>(global), real};
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || (real && reinterpret_cast<uintptr_t>(global) % 16 != 0)) {
    return fail(where(self, line) + ": an asynchronous copy is not aligned to 16 bytes");
  }
  for (ptrdiff_t i = 0; i < 4; ++i) machine.words[(copy.shared - machine.shared) / 4 + i].copying = self.index;
  if (machine.options.lazy) {
    memset(shared, 0xff, 16);
  } else {
    land(copy);
  }
  self.open.push_back(copy);
}

void commit_copies() {
  Thread& self = *machine.current;
  self.groups.push_back(std::move(self.open));
  self.open.clear();
}

void wait_copies(int groups_left, int line) {
  Thread& self = *machine.current;
  while (static_cast<int>(self.groups.size()) > groups_left) {
    for (const Copy& copy : self.groups.front()) {
      if (machine.options.lazy) land(copy);
      for (ptrdiff_t i = 0; i < 4; ++i) {
        Word& w = machine.words[(copy.shared - machine.shared) / 4 + i];
        w.copying = -1;
        w.write = {self.index, self.block_epoch, self.warp_epoch, line};
      }
    }
    self.groups.erase(self.groups.begin());
  }
}

}  // namespace sim
}  // namespace aah
