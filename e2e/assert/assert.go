// SPDX-License-Identifier: Apache-2.0

// Package assert has the checks that tests of all packages make. Equal, Contains and ErrorContains go on, the others
// end the test.
package assert

import (
	"net/netip"
	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go4.org/netipx"
)

// T is the part of testing.TB and rapid.T that this package uses.
type T interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// NoError fails the test on an error.
func NoError(t T, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%v", err)
	}
}

// Must returns the value of a function, and fails the test on an error:
//
//	text := assert.Must(os.ReadFile(path))(t)
func Must[V any](value V, err error) func(T) V {
	return func(t T) V {
		t.Helper()
		NoError(t, err)
		return value
	}
}

// Output runs a command, fails the test if the command does, and returns all that it printed.
func Output(t T, c interface{ CombinedOutput() ([]byte, error) }) string {
	t.Helper()
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", c, err, out)
	}
	return string(out)
}

// Contains fails the test unless a text has all the parts.
func Contains(t T, what, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%s: no %q in:\n%s", what, part, text)
		}
	}
}

// ErrorContains fails the test unless there is an error whose text has all the parts.
func ErrorContains(t T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want one with %q", parts)
		return
	}
	Contains(t, "error", err.Error(), parts...)
}

// Equal fails the test unless something is as it should be.
func Equal[V any](t T, what string, got, want V, options ...cmp.Option) {
	t.Helper()
	options = append(options, cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{}, netip.Prefix{}, netipx.IPRange{}))
	if diff := cmp.Diff(want, got, options...); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}
