// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

func TestBatchRefuses(t *testing.T) {
	long := strings.Repeat("x", 1<<16)
	for want, add := range map[string]func(b *Batch){
		`name "a\x00b" holds a NUL byte`:                       func(b *Batch) { b.AddTable(IPv4, "a\x00b") },
		`attribute of 65541 bytes is longer`:                   func(b *Batch) { b.DeleteTable(IPv4, long) },
		`comment of 254 bytes is too long`:                     func(b *Batch) { b.AddRule(IPv4, "t", "c", nil, long[:254]) },
		`comment "\x00" holds a NUL byte`:                      func(b *Batch) { b.AddRule(IPv4, "t", "c", nil, "\x00") },
		`expression "quota" is not known`:                      func(b *Batch) { b.AddRule(IPv4, "t", "c", []Expr{Unknown{"quota"}}, "") },
		`attribute of 65540 bytes is longer`:                   func(b *Batch) { b.AddRule(IPv4, "t", "c", []Expr{Match{Info: []byte(long)}}, "") },
		`nested attribute of 65556 bytes is longer`:            func(b *Batch) { b.AddRule(IPv4, "t", "c", []Expr{Match{Info: []byte(long[:65531])}}, "") },
		`10.0.0.2 to 10.0.0.1 is not a range`:                  func(b *Batch) { b.AddElements(IPv4, "t", "s", []netipx.IPRange{span("10.0.0.2", "10.0.0.1")}) },
		`10.0.0.2 to ::1 is not a range`:                       func(b *Batch) { b.DeleteElements(IPv4, "t", "s", []netipx.IPRange{span("10.0.0.2", "::1")}) },
		`invalid IP to invalid IP is not a range of addresses`: func(b *Batch) { b.AddElements(IPv6, "t", "s", []netipx.IPRange{{}}) },
	} {
		var b Batch
		b.AddTable(IPv6, "before")
		add(&b)
		b.AddTable(IPv6, "a\x00fter")
		// The connection is not used: nothing of such a batch is sent.
		err := new(Conn).Commit(&b)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "commit nf_tables batch: ") {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

func TestLongestComment(t *testing.T) {
	comment := strings.Repeat("x", 253)
	rule, err := decodeRule(encodeRule(t, "c", nil, comment))
	if err != nil || rule.Comment != comment {
		t.Errorf("got %q, %v", rule.Comment, err)
	}
}

func TestCommentAmongOtherData(t *testing.T) {
	for data, want := range map[string]string{
		"":                      "",
		"\x00":                  "",
		"\x00\x03ab\x00":        "ab",
		"\x01\x01z\x00\x02ab":   "ab",
		"\x00\x04ab\x00":        "",
		"\x01\x04\x00\x02\x00a": "",
	} {
		assert.Equal(t, fmt.Sprintf("%q", data), decodeComment([]byte(data)), want)
	}
}

func TestDecodeError(t *testing.T) {
	refused := message{typ: unix.NLMSG_ERROR, payload: append(native(t, -int32(unix.ENOENT)), make([]byte, unix.SizeofNlMsghdr)...)}
	if e, ok := errors.AsType[*Error](decodeError(refused)); !ok || e.Errno != unix.ENOENT {
		t.Errorf("got %+v", e)
	}
	if err := decodeError(message{payload: make([]byte, 20)}); err != nil {
		t.Errorf("acknowledgement: got %v", err)
	}
	if err := decodeError(message{payload: make([]byte, 3)}); !errors.Is(err, errMalformed) {
		t.Error("no error in three bytes")
	}
}
