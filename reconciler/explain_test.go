// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestSourceOf: of pods with one name the latest counts, also if all are from before the boot by the wall
// clock.
func TestSourceOf(t *testing.T) {
	pod := func(id string, at int64, address string) store.Pod {
		return store.Pod{
			Attachment: store.Attachment{Network: "podnet", ContainerID: id, IfName: "eth0"}, At: at,
			Namespace: "prod", Name: "web-0", Addresses: []netip.Addr{netip.MustParseAddr(address)},
		}
	}
	negative := []store.Pod{pod("a", -3, "10.1.0.5"), pod("b", -2, "10.1.0.6"), pod("c", -4, "10.1.0.7")}
	for want, pods := range map[string][]store.Pod{
		"10.1.0.6": negative,
		"10.1.0.8": append(negative, pod("d", 1, "10.1.0.8")),
	} {
		got, err := sourceOf("prod/web-0", pods, true)
		if err != nil {
			t.Error(err)
		}
		assert.Equal(t, "source", got.String(), want)
	}
	_, err := sourceOf("prod/web-1", negative, true)
	assert.ErrorContains(t, err, "no pod of this name")
}
