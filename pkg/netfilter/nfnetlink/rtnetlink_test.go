// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// TestOutputWithoutAnswer: a question that could not be asked has no answer, not the answer that there is no route.
func TestOutputWithoutAnswer(t *testing.T) {
	sandbox.NetworkNamespace(t)
	c := NewRouteConn()
	out, err := c.Output(netip.MustParseAddr("192.0.2.1"), netip.Addr{}, 0)
	if err != nil || out != 0 {
		t.Errorf("without a route: %d, %v", out, err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	sandbox.WithoutFiles(t)
	_, err = c.Output(netip.MustParseAddr("192.0.2.1"), netip.Addr{}, 0)
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("without a socket: %v", err)
	}
}
