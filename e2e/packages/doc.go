// SPDX-License-Identifier: Apache-2.0

// Package packages tests the packages of two releases on a bare Debian 12, with the build tag
// e2e_packages: installed, upgraded and downgraded while pods run, removed, and purged. Rules must never
// be missing, the conflist must be whole at each moment, and what it names must be there. dpkg and rpm run
// in a root of their own, in the namespaces of a sandbox; the service runs in a systemd of its own.
// `make e2e-packages` runs them; they need root.
package packages
