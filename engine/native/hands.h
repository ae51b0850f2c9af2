// Hands: threads of the lowest priority that take a share of a prompt's work wherever a core of the
// host has nothing else to do, and that nobody waits for where it has.
//
// Linux runs a SCHED_IDLE thread on cores that are idle, and takes the core away the moment anything
// else wakes up there, in the middle of an item too, for as long as that takes. So a hand writes
// nothing that others read but its own results; who offered the item copies them, or gives the item
// up and does it again. The hand may then still read what the item was made of: weights and scratch
// outlive it (see `pdserve_await_hands`).

#pragma once

#include <sched.h>
#include <semaphore.h>
#include <unistd.h>
#include <x86intrin.h>

#include <atomic>
#include <thread>
#include <type_traits>

#include "bf16.h"

namespace pdserve {

constexpr long BLOCK_ROWS = 128;  // of a product that one thread takes at a time

// Of one item.
struct alignas(64) Result {
    union {
        float sums[BLOCK_ROWS * TILE];
        uint16_t narrow[BLOCK_ROWS * TILE];
    };
};

// How many items hands did, and how many were taken from them again.
struct HandCounts {
    std::atomic<long> adopted{0}, given_up{0};
};
inline HandCounts hand_counts;

// One thread and the work it was offered, by one other thread at a time. A piece of work is a plain
// struct:
//     void compute(Result& result) const;        by the hand
//     void adopt(const Result& result) const;    by the one who offered it
//     void run() const;                          both in one, without the detour
class Hand {
   public:
    Hand() {
        sem_init(&wake_, 0, 0);
        // Of the process: the thread that makes it may be bound to one core.
        if (sched_getaffinity(getpid(), sizeof all_, &all_)) CPU_ZERO(&all_);
        std::thread([this] { live(); }).detach();
    }

    // Work comes; the hand looks for it until `rest`.
    void call() {
        is_called_.store(true, std::memory_order_relaxed);
        sem_post(&wake_);
    }
    void rest() { is_called_.store(false, std::memory_order_relaxed); }

    // Whether it still has something that was given up.
    bool is_out() const { return slot_in(GIVEN_UP) != nullptr; }

    bool has_room() const { return slot_in(EMPTY) && !is_out(); }

    // Where the calling thread is, the hand could do nothing; but the kernel likes to wake it there,
    // and looks after threads of this priority seldom.
    void keep_off() {
        int cpu = sched_getcpu(), id = id_.load(std::memory_order_relaxed);
        if (cpu == kept_off_ || !id) return;
        cpu_set_t others = all_;
        CPU_CLR(cpu, &others);
        sched_setaffinity(id, sizeof others, &others);
        kept_off_ = cpu;
    }

    template <class Work>
    void offer(const Work& work) {
        static_assert(std::is_trivially_copyable<Work>::value && sizeof(Work) <= sizeof(Slot::work));
        Slot* slot = slot_in(EMPTY);
        memcpy(slot->work, &work, sizeof work);
        slot->compute = [](const void* work, Result& result) {
            static_cast<const Work*>(work)->compute(result);
        };
        slot->adopt = [](const void* work, const Result& result) {
            static_cast<const Work*>(work)->adopt(result);
        };
        slot->run = [](const void* work) { static_cast<const Work*>(work)->run(); };
        slot->state.store(OFFERED, std::memory_order_release);
    }

    void adopt_done() {
        for (Slot& slot : slots_) {
            if (slot.state.load(std::memory_order_acquire) != DONE) continue;
            slot.adopt(slot.work, slot.result);
            slot.state.store(EMPTY, std::memory_order_relaxed);
            hand_counts.adopted.fetch_add(1, std::memory_order_relaxed);
        }
    }

    // Leaves no work with the hand: does itself what the hand has not begun, and what it does not
    // end within `patience` ticks.
    void take_back(uint64_t patience) {
        for (Slot& slot : slots_)
            if (move(slot, OFFERED, EMPTY)) slot.run(slot.work);
        uint64_t start = __rdtsc();
        for (Slot& slot : slots_)
            while (slot.state.load(std::memory_order_acquire) == TAKEN) {
                if (__rdtsc() - start < patience) {
                    _mm_pause();
                } else {
                    // From the move on the hand may free the slot, but only for this thread to fill.
                    if (!move(slot, TAKEN, GIVEN_UP)) continue;
                    slot.run(slot.work);
                    hand_counts.given_up.fetch_add(1, std::memory_order_relaxed);
                    break;
                }
            }
        adopt_done();
    }

   private:
    // EMPTY to OFFERED to TAKEN to DONE to EMPTY. The hand alone moves a slot to TAKEN and DONE, and
    // a GIVEN_UP one to EMPTY; the other thread does the rest.
    enum State { EMPTY, OFFERED, TAKEN, DONE, GIVEN_UP };

    struct Slot {
        alignas(64) std::atomic<int> state{EMPTY};
        void (*compute)(const void* work, Result& result);
        void (*adopt)(const void* work, const Result& result);
        void (*run)(const void* work);
        alignas(16) char work[256];
        Result result;
    };

    static bool move(Slot& slot, int from, int to) {
        return slot.state.compare_exchange_strong(from, to, std::memory_order_acq_rel);
    }

    Slot* slot_in(State state) const {
        for (const Slot& slot : slots_)
            if (slot.state.load(std::memory_order_acquire) == state) return const_cast<Slot*>(&slot);
        return nullptr;
    }

    void live() {
        sched_param none = {};
        if (sched_setscheduler(0, SCHED_IDLE, &none)) return;  // then it takes nothing, ever
        sched_setaffinity(0, sizeof all_, &all_);
        id_.store(gettid(), std::memory_order_relaxed);
        while (true) {
            while (sem_wait(&wake_)) continue;
            for (long spins = 1; is_called_.load(std::memory_order_relaxed); spins++) {
                for (Slot& slot : slots_)
                    if (move(slot, OFFERED, TAKEN)) {
                        slot.compute(slot.work, slot.result);
                        if (!move(slot, TAKEN, DONE)) move(slot, GIVEN_UP, EMPTY);
                    }
                spins % 1000 ? _mm_pause() : static_cast<void>(sched_yield());
            }
        }
    }

    sem_t wake_;
    cpu_set_t all_;
    std::atomic<int> id_{0};  // of the thread
    int kept_off_ = -1;
    std::atomic<bool> is_called_{false};
    Slot slots_[3];
};

// Of the process. Made when first asked for, never ended: they sleep between calls. One call at a
// time has them; another beside it goes without.
class Hands {
   public:
    explicit Hands(int count) : has_them_(count > 0 && !is_taken_.exchange(true)) {
        if (!has_them_) return;
        count_ = count < MOST ? count : MOST;
        for (int i = 0; i < count_; i++) {
            if (!all_[i]) all_[i] = new Hand;
            all_[i]->call();
        }
    }
    ~Hands() {
        for (int i = 0; i < count_; i++) all_[i]->rest();
        if (has_them_) is_taken_.store(false);
    }

    Hand* get(int i) const { return i < count_ ? all_[i] : nullptr; }

    static bool are_back() {
        for (Hand* hand : all_)
            if (hand && hand->is_out()) return false;
        return true;
    }

    // Even the lowest priority has a share of a core that is busy for good, if a small one.
    static bool await_all() {
        for (int i = 0; i < 1000 && !are_back(); i++) usleep(1000);
        return are_back();
    }

   private:
    static constexpr int MOST = 64;
    static inline Hand* all_[MOST];
    static inline std::atomic<bool> is_taken_{false};
    bool has_them_;
    int count_ = 0;
};

}  // namespace pdserve
