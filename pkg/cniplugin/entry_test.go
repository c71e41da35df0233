// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"fmt"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types/create"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
)

func TestPodSubnets(t *testing.T) {
	const interfaces = `"interfaces":[{"name":"cni0"},{"name":"eth0","sandbox":"/run/netns/a"},{"name":"net1","sandbox":"/run/netns/a"}]`
	for name, c := range map[string]struct{ prevResult, want string }{
		"both families":     {interfaces + `,"ips":[{"interface":1,"address":"10.1.2.3/24"},{"interface":1,"address":"fd00:1::5/64"}]`, "[10.1.2.0/24 fd00:1::/64]"},
		"0.2.0":             {`"ip4":{"ip":"10.1.2.3/24","gateway":"10.1.2.1"},"ip6":{"ip":"fd00:1::5/64"}`, "[10.1.2.0/24 fd00:1::/64]"},
		"no interface":      {`"ips":[{"address":"10.1.2.3/24"}]`, "[10.1.2.0/24]"},
		"bridge":            {interfaces + `,"ips":[{"interface":0,"address":"10.1.2.1/24"}]`, "[]"},
		"another interface": {interfaces + `,"ips":[{"interface":2,"address":"10.1.2.1/24"}]`, "[]"},
		"no such interface": {interfaces + `,"ips":[{"interface":3,"address":"10.1.2.1/24"},{"interface":4,"address":"10.1.2.1/24"},` +
			`{"interface":-1,"address":"10.1.2.1/24"}]`, "[]"},
		"no sandbox":       {`"interfaces":[{"name":"eth0"}],"ips":[{"interface":0,"address":"10.1.2.1/24"}]`, "[]"},
		"whole addresses":  {`"ips":[{"address":"10.1.2.3/32"},{"address":"fd00:1::5/128"}]`, "[]"},
		"point to point":   {`"ips":[{"address":"10.1.2.3/31"},{"address":"fd00:1::5/127"}]`, "[10.1.2.2/31 fd00:1::4/127]"},
		"link-local":       {`"ips":[{"address":"169.254.1.2/16"},{"address":"fe80::5/64"}]`, "[]"},
		"everything":       {`"ips":[{"address":"10.1.2.3/0"},{"address":"fd00:1::5/0"}]`, "[]"},
		"too short a mask": {`"ips":[{"address":"10.1.2.3/1"},{"address":"10.1.2.3/7"},{"address":"fd00:1::5/31"}]`, "[]"},
		"shortest masks":   {`"ips":[{"address":"10.1.2.3/8"},{"address":"fd00:1::5/32"}]`, "[10.0.0.0/8 fd00:1::/32]"},
		"many": {`"ips":[` + strings.Repeat(`{"address":"10.1.2.3/24"},`, 1000) + `{"address":"10.1.2.3/24"}]`,
			"[" + strings.Repeat("10.1.2.0/24 ", 15) + "10.1.2.0/24]"},
		"mapped":     {`"ips":[{"address":"::ffff:10.1.2.3/120"}]`, "[]"},
		"null":       {`"interfaces":null,"ips":[null],"ip4":null`, "[]"},
		"no address": {`"ips":[{}],"ip4":{}`, "[]"},
	} {
		for _, version := range []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
			want := c.want
			if isOld := version < "0.3.0"; isOld != (name == "0.2.0") {
				want = "[]" // the keys of another version
			}
			result, err := create.Create(version, []byte(`{"cniVersion":"`+version+`",`+c.prevResult+`}`))
			if err != nil && name != "no address" {
				t.Fatal(err)
			}
			assert.Equal(t, fmt.Sprintf("%s, %s", version, name), fmt.Sprint(podSubnets(podinfo.Networks(result, "eth0"))), want)
		}
	}
	if got := podSubnets(nil); got != nil {
		t.Errorf("without a result: %s", got)
	}
}
