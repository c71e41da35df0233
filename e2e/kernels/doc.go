// SPDX-License-Identifier: Apache-2.0

// Package kernels runs this project's tests in virtual machines, each with the kernel and the
// programs of a Debian suite. The machines are emulated by qemu, without KVM, so that they need
// nothing of the machine below and can be of other architectures; they are 20 to 40 times slower
// than it. `make e2e-kernels` runs all of them, `make e2e-kernels KERNELS=bookworm-amd64` one. Each
// says before it starts how long it takes, and writes docs/kernels/MACHINE.json when it ends. The
// table of all of them is docs/kernels/README.md. The tests have the build tag e2e_kernels, need root
// and the Debian packages that the target installs, and fail if something is missing.
package kernels
