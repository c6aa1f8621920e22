//! Measures how much memory a piece of code or a process uses.
//!
//! The allocator of the test program counts the bytes that each thread has now, and the most that it had. That is how a
//! test proves that a few bytes from outside cannot expand into many.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;

use anyhow::{Context as _, Result};

struct Metered;

#[global_allocator]
static METERED: Metered = Metered;

thread_local! {
    // They have no destructor, so they can be used while a thread ends.
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let now = NOW.get().wrapping_add(bytes);
    NOW.set(now);
    PEAK.set(PEAK.get().max(now));
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Metered {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as the caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size.cast_signed() - layout.size().cast_signed());
        // SAFETY: as the caller promised.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// The result of `work`, and the most bytes that this thread had allocated at one time.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.get();
    PEAK.set(before);
    let result = work();
    (result, PEAK.get().wrapping_sub(before).max(0).cast_unsigned())
}

/// Memory of a process in KiB: `VmRSS:` is what is resident now, `VmHWM:` the most that was.
pub fn process_memory(pid: u32, field: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("no such field")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

/// Sets the peak of a process to what is resident now, and returns that in KiB.
pub fn reset_process_peak(pid: u32) -> Result<u64> {
    // proc(5) describes this number.
    fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
    process_memory(pid, "VmRSS:")
}

#[test]
fn what_was_held_at_one_time_is_counted_and_no_more() {
    let ((), peak) = peak_of(|| {
        for _ in 0..100 {
            drop(std::hint::black_box(vec![0_u8; 1 << 20]));
        }
    });
    assert!((1 << 20..2 << 20).contains(&peak), "{peak}");
}
