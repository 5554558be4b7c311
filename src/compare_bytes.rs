//! The comparison of bytes of static programs. That of musl goes byte by byte, and to sort and look up names that begin alike, as those
//! of tensors do, is mostly that: an eighth of the processor time of planning 150 000 of them.
#![allow(unsafe_code)]

use std::ffi::c_int;

/// The order of 8 bytes of each side, as that of two numbers.
///
/// # Safety
/// Both sides have 8 bytes from `at` on.
unsafe fn order_at(left: *const u8, right: *const u8, at: usize) -> Option<c_int> {
    // SAFETY: the caller says that these bytes are there; no alignment is needed.
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
#[cfg_attr(target_env = "musl", unsafe(no_mangle))]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_order_of_slices() {
        let base: Vec<u8> = (0..40_u8).map(|at| at.wrapping_mul(89)).collect();
        for len in 0..=40 {
            for first in 0..=8.min(40 - len) {
                let left = &base[first..first + len];
                let mut right = left.to_vec();
                // SAFETY: both have `len` bytes.
                assert_eq!(unsafe { memcmp(left.as_ptr(), right.as_ptr(), len) }, 0);
                for at in 0..len {
                    for other in [0, 1, 0x7f, 0x80, 0xff] {
                        right[at] = other;
                        // SAFETY: likewise.
                        let found = unsafe { memcmp(left.as_ptr(), right.as_ptr(), len) };
                        assert_eq!(found.cmp(&0), left.cmp(right.as_slice()), "{left:?} {right:?}");
                    }
                    right[at] = left[at];
                }
            }
        }
    }
}
