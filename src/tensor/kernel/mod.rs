//! One source for every instruction set: loops written once in plain integer and f32 code, compiled once per [`Level`]
//! and chosen at run time. The levels cannot differ in their results: they differ in nothing but code generation, and
//! Rust neither contracts nor reorders floating-point arithmetic.

pub(super) mod affine;
pub(super) mod encode;
pub(super) mod product;
pub(super) mod row;
pub(super) mod unpack;

/// The width of the vectors. A value other than portable exists only on a processor that has the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Level(Width);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The instructions that every processor of the target architecture has.
    pub(super) const PORTABLE: Self = Self(Width::Portable);

    /// The best level of this processor. Detection is cached by the standard library.
    pub(super) fn detected() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if Self::has_avx512() {
                return Self(Width::Avx512);
            }
            if is_x86_feature_detected!("avx2") {
                return Self(Width::Avx2);
            }
        }
        Self::PORTABLE
    }

    /// Whether vectors of 32 bytes may be used: those of AVX2, with which AVX-512 comes.
    pub(crate) fn has_avx2(self) -> bool {
        self != Self::PORTABLE
    }

    /// Every level of this processor, for tests that compare them.
    #[cfg(test)]
    pub(super) fn available() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "there are no others"))]
        let mut levels = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                levels.push(Self(Width::Avx2));
            }
            if Self::has_avx512() {
                levels.push(Self(Width::Avx512));
            }
        }
        levels
    }

    #[cfg(target_arch = "x86_64")]
    fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
    }
}
