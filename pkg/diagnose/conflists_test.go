// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"net/netip"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// A pod on record is behind the main plugin of its network, and another source behind all of them.
func TestNoHookPlugin(t *testing.T) {
	h := newHost(t)
	h.files["etc/cni/net.d/20-second.conflist"] = conflist("second", `{"type": "macvlan"}`, entry)
	h.files["etc/cni/net.d/30-third.conflist"] = conflist("third", `{"type": "ipvlan"}`)
	mixed := h.node().ConfDir
	h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", `{"type": "host-device"}`, entry)
	all := h.node().ConfDir
	pods := onRecord("10.244.1.5")
	second := store.Pod{Attachment: store.Attachment{Network: "second"}, Addresses: addresses("10.9.0.5"), At: 7}
	former := store.Pod{Attachment: store.Attachment{Network: "pods"}, Addresses: addresses("10.9.0.5"), At: 6}
	pods = append(pods, second, former)
	early := store.Pod{Attachment: store.Attachment{Network: "second"}, Addresses: addresses("10.9.0.6"), At: -1}
	pods = append(pods, early)
	want := map[string]string{"10.244.1.5": "", "10.9.0.5": "macvlan", "10.9.0.6": "macvlan", "10.8.0.5": ""}
	for source, want := range want {
		assert.Equal(t, source, NoHookPlugin(netip.MustParseAddr(source), pods, mixed), want)
	}
	for source, want := range map[string]string{"10.244.1.5": "host-device", "10.9.0.5": "macvlan", "10.8.0.5": "macvlan"} {
		assert.Equal(t, source, NoHookPlugin(netip.MustParseAddr(source), pods, all), want)
	}
	assert.Equal(t, "any source", NoHookPlugin(netip.Addr{}, pods, mixed), "")
	assert.Equal(t, "no conflist", NoHookPlugin(netip.Addr{}, nil, config.ConfDir{}), "")
}
