# To be sourced: the C compilers and the linker of the static programs, for both processors, on a machine with x86-64.
export CC_x86_64_unknown_linux_musl=${CC_x86_64_unknown_linux_musl:-musl-gcc}
export CC_aarch64_unknown_linux_musl=${CC_aarch64_unknown_linux_musl:-aarch64-linux-gnu-gcc}
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=$CC_aarch64_unknown_linux_musl
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=qemu-aarch64
# mimalloc asks the kernel for huge pages of its whole reserve, even where only programs that ask get them: 38 MiB for a heap of 7 MiB.
# It is to ask for none, and to leave the setting of the process, which the buffers of ckfs and its children use, as it is.
# Set once: a shell that has sourced this passes it on, and with other flags cargo would build everything again that has C code beneath.
if [[ ${CFLAGS_x86_64_unknown_linux_musl:-} != *-DMI_NO_THP=1* ]]; then
    mimalloc_flags='-DMI_NO_THP=1 -DMI_DEFAULT_ALLOW_THP=1'
    export CFLAGS_x86_64_unknown_linux_musl="$mimalloc_flags ${CFLAGS_x86_64_unknown_linux_musl:-}"
    export CFLAGS_aarch64_unknown_linux_musl="$mimalloc_flags ${CFLAGS_aarch64_unknown_linux_musl:-}"
    unset mimalloc_flags
fi
