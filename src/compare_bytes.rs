//! The comparison of bytes of static programs. That of musl goes byte by byte, and to sort and look up names that begin alike, as those
//! of tensors do, is mostly that: an eighth of the processor time of planning 150 000 of them.
#![allow(unsafe_code)]

use std::ffi::c_int;

/// The order of 8 bytes of each side, as that of two numbers.
///
/// # Safety
/// Both sides have 8 bytes from `at` on.
unsafe fn order_at(left: *const u8, right: *const u8, at: usize) -> Option<c_int> {
    // SAFETY: the caller says that these bytes are there; no alignment is asked for.
    let [left, right] = [left, right].map(|side| unsafe { side.add(at).cast::<u64>().read_unaligned() });
    if left == right {
        return None;
    }
    Some(if u64::from_be(left) < u64::from_be(right) { -1 } else { 1 })
}

/// The C function.
///
/// # Safety
/// Both sides have `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, len: usize) -> c_int {
    if len < 8 {
        // SAFETY: `at` is less than the length.
        let byte = |side: *const u8, at| c_int::from(unsafe { *side.add(at) });
        let differs = |at: &usize| byte(left, *at) != byte(right, *at);
        return (0..len).find(differs).map_or(0, |at| byte(left, at) - byte(right, at));
    }
    let mut at = 0;
    while at + 8 < len {
        // SAFETY: the eight bytes end before the length.
        if let Some(order) = unsafe { order_at(left, right, at) } {
            return order;
        }
        at += 8;
    }
    // SAFETY: there are eight bytes or more. Those that are compared again are equal.
    unsafe { order_at(left, right, len - 8) }.unwrap_or(0)
}
