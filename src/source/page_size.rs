//! Sizes of this system's memory pages.
//!
//! x86-64 has pages of 4 KiB and huge pages of 2 MiB. Kernels for aarch64 have 4 KiB and 2 MiB, 16 KiB and 32 MiB, or 64 KiB and
//! 512 MiB. So no size is a constant.

use std::{fs, sync::OnceLock};

use super::local::guard;

/// Larger huge pages are not used: a file or a buffer would take far more memory than it has bytes, and a read of one block would
/// read far more from disk.
const HUGE_PAGE_BYTES_MAX: usize = 2 << 20;

/// Bytes of a memory page, in which files are cached and read.
pub fn page_bytes() -> u64 {
    guard::page_bytes() as u64
}

/// Bytes of the pages in which large buffers and files in memory are allocated: huge pages where the system has huge pages of at most
/// 2 MiB, else ordinary pages.
pub fn allocation_page_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok();
        allocation_page_bytes_of(guard::page_bytes(), text.as_deref())
    })
}

/// Whether large buffers and files in memory are allocated in huge pages.
pub fn uses_huge_pages() -> bool {
    allocation_page_bytes() > guard::page_bytes()
}

/// `huge` is what the kernel says of its huge pages; `None` where it has none, or its `/sys` is not there.
fn allocation_page_bytes_of(page_bytes: usize, huge: Option<&str>) -> usize {
    // A page of page table entries of 8 bytes maps one huge page.
    let by_tables = page_bytes / 8 * page_bytes;
    let huge = huge.map_or(by_tables, |text| text.trim().parse().unwrap_or(by_tables));
    if huge.is_power_of_two() && (page_bytes..=HUGE_PAGE_BYTES_MAX).contains(&huge) { huge } else { page_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_used_up_to_2_mib() {
        for (page, huge, expected) in [
            (4 << 10, Some("2097152\n"), 2 << 20),
            (4 << 10, None, 2 << 20),
            (16 << 10, Some("33554432\n"), 16 << 10),
            (16 << 10, None, 16 << 10),
            (64 << 10, Some("536870912\n"), 64 << 10),
            (64 << 10, Some("2097152\n"), 2 << 20),
            (4 << 10, Some("0\n"), 4 << 10),
            (4 << 10, Some("nonsense\n"), 2 << 20),
        ] {
            assert_eq!(allocation_page_bytes_of(page, huge), expected, "{page} {huge:?}");
        }
        assert!(page_bytes().is_power_of_two() && allocation_page_bytes().is_multiple_of(guard::page_bytes()));
    }
}
