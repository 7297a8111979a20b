#!/usr/bin/env bash
# Makes the certificates of the tests again: `tests/certificates/make.sh`, with OpenSSL 3. They are valid from 2020 to 2120, and protect
# nothing. Each file has a certificate and its key. ca.pem signs worker.pem and front_end.pem (for 127.0.0.1 and localhost),
# elsewhere.pem (for another host) and expired.pem; other_ca.pem signs stranger.pem.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
cd "$(mktemp -d)"
cat >config <<'END'
[ca]
default_ca = it
[it]
new_certs_dir = .
database = index
rand_serial = yes
default_md = sha256
policy = any
[any]
commonName = supplied
END
touch index
sign() { # name, end, extensions, further arguments
    printf '%b' "$3" >extensions
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj "/CN=$1" -keyout "$1.key" -out "$1.csr" 2>/dev/null
    openssl ca -batch -notext -config config -in "$1.csr" -out "$1.pem" -startdate 20200101000000Z -enddate "$2" -extfile extensions \
        "${@:4}" 2>/dev/null
}
authority() {
    sign "$1" 21200101000000Z 'basicConstraints=critical,CA:true\nkeyUsage=keyCertSign\n' -selfsign -keyfile "$1.key"
    cp "$1.pem" "$folder"
}
certificate() { # name, authority, subject alternative names, end
    sign "$1" "$4" "subjectAltName=$3\nextendedKeyUsage=serverAuth,clientAuth\n" -cert "$2.pem" -keyfile "$2.key"
    cat "$1.pem" "$1.key" >"$folder/$1.pem"
}
here=IP:127.0.0.1,DNS:localhost
authority ca
authority other_ca
certificate worker ca $here 21200101000000Z
certificate front_end ca $here 21200101000000Z
certificate elsewhere ca DNS:elsewhere.example 21200101000000Z
certificate expired ca $here 20210101000000Z
certificate stranger other_ca $here 21200101000000Z
