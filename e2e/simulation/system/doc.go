// SPDX-License-Identifier: Apache-2.0

// Package system is what the operating system does for the simulated node: files that can be lost in a crash, locks,
// the boot and its clock. Only package simulation uses it: its build replaces the calls of packages os, unix, ns and sysctl in
// the product by the functions of the same names here. Each call is an effect: the simulation decides which process has the
// next one, and which process ends before it.
package system
