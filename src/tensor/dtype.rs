//! Element types, one row each.
//!
//! The set and the codes are those of safetensors 0.8 (`Dtype` in its `tensor.rs`). Widths are in bits because three
//! of the types are narrower than a byte; such tensors are read and cut in *units* of whole bytes ([`DType::unit`]).

use std::fmt;

macro_rules! dtypes {
    ($($variant:ident $code:literal $name:literal $bits:literal $is_float:literal;)*) => {
        /// Type of one tensor element.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum DType {
            $(#[doc = concat!("`", $code, "` in safetensors, `", $name, "` in numpy and jax.")] $variant,)*
        }

        impl DType {
            /// Every element type.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Safetensors code, such as `BF16`.
            pub const fn code(self) -> &'static str {
                match self { $(Self::$variant => $code,)* }
            }

            /// Name in numpy, jax and `ml_dtypes`, such as `bfloat16`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Width of one element in bits.
            pub const fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)* }
            }

            /// Whether ckfs converts values of this type to and from other float types. It passes bare exponents and floats below a
            /// byte through as they are.
            pub const fn is_float(self) -> bool {
                match self { $(Self::$variant => $is_float,)* }
            }
        }
    };
}

dtypes! {
    Bool "BOOL" "bool" 8 false;
    F4 "F4" "float4_e2m1fn" 4 false;
    F6E2M3 "F6_E2M3" "float6_e2m3fn" 6 false;
    F6E3M2 "F6_E3M2" "float6_e3m2fn" 6 false;
    U8 "U8" "uint8" 8 false;
    I8 "I8" "int8" 8 false;
    F8E5M2 "F8_E5M2" "float8_e5m2" 8 true;
    F8E4M3 "F8_E4M3" "float8_e4m3fn" 8 true;
    F8E8M0 "F8_E8M0" "float8_e8m0fnu" 8 false;
    F8E4M3Fnuz "F8_E4M3FNUZ" "float8_e4m3fnuz" 8 true;
    F8E5M2Fnuz "F8_E5M2FNUZ" "float8_e5m2fnuz" 8 true;
    I16 "I16" "int16" 16 false;
    U16 "U16" "uint16" 16 false;
    F16 "F16" "float16" 16 true;
    BF16 "BF16" "bfloat16" 16 true;
    I32 "I32" "int32" 32 false;
    U32 "U32" "uint32" 32 false;
    F32 "F32" "float32" 32 true;
    C64 "C64" "complex64" 64 false;
    F64 "F64" "float64" 64 true;
    I64 "I64" "int64" 64 false;
    U64 "U64" "uint64" 64 false;
}

/// The smallest group of consecutive elements that fills whole bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Elements in one unit: 1 for types of a byte or more, 2 for 4-bit and 4 for 6-bit types.
    pub elements: u64,
    /// Bytes of one unit.
    pub bytes: u64,
}

impl DType {
    /// The unit in which tensors of this type are cut.
    pub const fn unit(self) -> Unit {
        match self.bits() {
            4 => Unit { elements: 2, bytes: 1 },
            6 => Unit { elements: 4, bytes: 3 },
            bits => Unit { elements: 1, bytes: bits / 8 },
        }
    }

    /// Bytes of one element, or `None` where an element is not a whole number of bytes.
    pub const fn element_bytes(self) -> Option<u64> {
        let unit = self.unit();
        if unit.elements == 1 { Some(unit.bytes) } else { None }
    }

    /// Bytes of `elements` consecutive elements, or `None` if they do not fill whole bytes or the count overflows.
    pub const fn bytes_of(self, elements: u64) -> Option<u64> {
        let unit = self.unit();
        if !elements.is_multiple_of(unit.elements) {
            return None;
        }
        (elements / unit.elements).checked_mul(unit.bytes)
    }

    /// The type for a user's word: a safetensors code, a numpy name or a short form such as `bf16` or `f8_e4m3`, in
    /// upper or lower case.
    pub fn from_user(word: &str) -> Option<Self> {
        let lower = word.to_ascii_lowercase();
        let lower = lower.strip_prefix("torch.").unwrap_or(&lower);
        Self::ALL.iter().copied().find(|dtype| dtype.code().to_ascii_lowercase() == lower || dtype.name() == lower).or(
            match lower {
                "float" | "fp32" => Some(Self::F32),
                "half" | "fp16" => Some(Self::F16),
                "double" | "fp64" => Some(Self::F64),
                "f8_e4m3fn" | "f8e4m3" | "fp8" => Some(Self::F8E4M3),
                "f8e5m2" => Some(Self::F8E5M2),
                _ => None,
            },
        )
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_are_unique_and_found_again() {
        for (row, dtype) in DType::ALL.iter().enumerate() {
            assert_eq!(DType::ALL.iter().filter(|other| other.code() == dtype.code()).count(), 1);
            assert_eq!(DType::from_user(dtype.name()), Some(*dtype));
            assert_eq!(DType::from_user(&dtype.code().to_lowercase()), Some(*dtype));
            assert!(DType::ALL[..row].iter().all(|other| other.code() != dtype.code() && other.name() != dtype.name()));
        }
    }

    #[test]
    fn floats_have_the_names_of_other_programs() {
        for (word, dtype) in
            [("fp16", DType::F16), ("FP32", DType::F32), ("fp64", DType::F64), ("torch.half", DType::F16)]
        {
            assert_eq!(DType::from_user(word), Some(dtype), "{word}");
        }
    }

    #[test]
    fn units_fill_whole_bytes() {
        for dtype in DType::ALL {
            let unit = dtype.unit();
            assert_eq!(unit.elements * dtype.bits(), unit.bytes * 8, "{dtype}");
        }
        assert_eq!(DType::F4.bytes_of(6), Some(3));
        assert_eq!(DType::F4.bytes_of(7), None);
        assert_eq!(DType::F6E2M3.bytes_of(8), Some(6));
        assert_eq!(DType::F6E2M3.bytes_of(6), None);
        assert_eq!(DType::C64.bytes_of(u64::MAX), None);
    }

    #[test]
    fn codes_are_those_of_the_safetensors_crate() {
        for dtype in DType::ALL {
            let parsed: safetensors::Dtype = serde_json::from_str(&format!("\"{}\"", dtype.code())).unwrap();
            assert_eq!(parsed.bitsize() as u64, dtype.bits(), "{dtype}");
        }
    }
}
