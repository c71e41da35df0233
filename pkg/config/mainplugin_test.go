// SPDX-License-Identifier: Apache-2.0

package config

import (
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

func TestNoHookPlugin(t *testing.T) {
	for plugins, want := range map[string]string{
		`{"type": "macvlan", "master": "eth0"}, {"type": "ip-masq"}`:                               "macvlan",
		`{"type": "ipvlan"}, {"type": "ip-masq"}`:                                                  "ipvlan",
		`{"type": "ipvlan", "mode": "l2"}, {"type": "ip-masq"}`:                                    "ipvlan",
		`{"type": "ipvlan", "mode": "l3"}, {"type": "ip-masq"}`:                                    "ipvlan",
		`{"type": "ipvlan", "mode": "l3s"}, {"type": "ip-masq"}`:                                   "",
		`{"type": "sriov"}, {"type": "tuning"}, {"type": "ip-masq"}`:                               "sriov",
		`{"type": "host-device", "device": "eth1"}, {"type": "ip-masq"}`:                           "host-device",
		`{"type": "flannel", "delegate": {"type": "macvlan"}}, {"type": "ip-masq"}`:                "macvlan",
		`{"type": "flannel", "delegate": {"type": "bridge"}}, {"type": "ip-masq"}`:                 "",
		`{"type": "bridge", "mode": 7, "delegate": "x"}, {"type": "ip-masq"}, {"type": "macvlan"}`: "",
		`{"type": "ptp"}, {"type": "ip-masq"}`:                                                     "",
	} {
		list := ParseConflist("10.conflist", []byte(`{"cniVersion": "1.0.0", "name": "net", "plugins": [`+plugins+`]}`))
		assert.NoError(t, list.Err)
		assert.Equal(t, plugins, list.NoHookPlugin(), want)
	}
}
