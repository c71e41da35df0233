// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestParseMark(t *testing.T) {
	for _, c := range []struct {
		text string
		want policy.Mark
		ok   bool
	}{
		{"0x6000", 0x6000, true},
		{"0xFFFFFFFF", 0xffffffff, true},
		{"24576", 0x6000, true},
		{"0", 0, true},
		{"0x100000000", 0, false},
		{"-1", 0, false},
		{"", 0, false},
		{"0b11", 0, false},
		{"0x60_00", 0, false},
		{"0x6000/0x6000", 0, false},
	} {
		got, err := policy.ParseMark(c.text)
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("ParseMark(%q) = %s, %v; want %s, valid %t", c.text, got, err, c.want, c.ok)
		}
		if c.ok {
			again, err := policy.ParseMark(got.String())
			if again != got || err != nil {
				t.Errorf("%s does not read back: %s, %v", got, again, err)
			}
		}
	}
}
