// How a thread is scheduled.
#pragma once

namespace dfkv {

// Asks the kernel for short turns that begin soon, for the calling thread, which does little and is waited
// for: a thread that wakes beside busy ones otherwise waits for the rest of their turn, some milliseconds.
// Linux from 6.12 on; elsewhere nothing changes. Needs no privilege and takes no more of the processor than
// before.
void prefer_short_turns();

// The calling thread moves payload: where processors are short, threads that answer lookups run first.
void give_way_to_lookups();

}  // namespace dfkv
